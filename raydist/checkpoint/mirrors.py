"""Copies of committed checkpoints on other storage: made and verified in the background, used if the run's own copy is bad.

Runs in: rank 0, a thread for each replica and one that verifies; the readers anywhere. Plain python, no torch.

    commit --> run ----copy, hash, read back, manifest last----> replica 1, replica 2, ...
    every so many commits: all files are read again; a bad one is copied from a good place

A replica is a folder that holds runs, like `--storage`. Only the end of the run waits for replicas, for a bounded time; an event
reports one that cannot be reached. Each round copies everything that is missing there, also what an earlier round could not copy.

The run notes each replica in a local folder that it has had, in RUN/mirrors. Such a folder is not made again: where it is missing,
its file system is not mounted.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import xxhash

from raydist.checkpoint import manifest, retention
from raydist.checkpoint.manifest import EVAL, READ_BYTES, FileEntry, path
from raydist.errors import CheckpointCorrupt, CheckpointNotFound, RaydistError, StorageError, UserError
from raydist.records import Event
from raydist.redact import redact
from raydist.run.directory import ATTEMPTS, MIRRORS, RunDir, fenced
from raydist.sinks import write_whole
from raydist.storage import GONE, Storage

T = TypeVar("T")

LOOK_S = 20.0
"""How long the start of a run waits for a replica's answer."""


def replica_of(run: RunDir, uri: str) -> RunDir:
    """This run's folder in the replica at `uri`, guarded once the run has noted it.

    Raises UserError if that is the run's own folder, StorageError if the run's notes cannot be read.
    """
    found = RunDir(Storage(uri).at(run.name))
    if found.uri == run.uri:
        raise UserError(f"checkpoint.replicas: {uri} holds the run itself", "name other storage, or leave it out")
    return found.guard() if _noted(run, found) else found


def _note(replica: RunDir) -> str:
    return f"{MIRRORS}/{xxhash.xxh3_64_hexdigest(os.fsencode(replica.uri))}.json"


def _noted(run: RunDir, replica: RunDir) -> bool:
    return replica.storage.local is not None and run.storage.size(_note(replica)) is not None


def mounted(run: RunDir, uri: str) -> RunDir:
    """`replica_of`. Raises StorageError if the run has had it and it is not there."""
    replica = replica_of(run, uri)
    if replica.storage.marks:
        try:
            replica.expect()
        except StorageError as error:
            raise StorageError(
                f"{replica.uri} on {socket.gethostname()}: {GONE} If it was deleted, delete {run.uri}/{_note(replica)} too"
            ) from error
    return replica


def answer(look: Callable[[], T]) -> T:
    """The result of `look`, after at most LOOK_S seconds. Raises StorageError after that time; the thread continues."""
    found: list[T] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            found.append(look())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, name="raydist-look", daemon=True)
    thread.start()
    thread.join(LOOK_S)
    if failed:
        raise failed[0]
    if not found:
        raise StorageError(f"no answer in {LOOK_S:g} s")
    return found[0]


def newest_attempt(run: RunDir, uris: Sequence[str]) -> int:
    """The highest attempt number in any replica; 0 without one. A replica that cannot be reached counts as empty.

    A run whose own folder was lost continues from this number: commits of an attempt with a lower number would be void.
    """
    newest = 0
    for uri in uris:
        with suppress(RaydistError, OSError):
            newest = max(newest, answer(lambda uri=uri: mounted(run, uri).lineage().newest))  # type: ignore[misc]
    return newest


def copy(source: RunDir, target: RunDir, step: int, name: str) -> int:
    """Copies the checkpoint of `step` with the manifest `name` to `target`, byte for byte; the number of bytes copied.

    Files that are good there already stay. Each copied file is read again and its hash compared; the manifest comes last. Raises
    CheckpointCorrupt that names the source's bad file, CheckpointNotFound if the source is being pruned, StorageError.
    """
    copied = 0
    with retention.leased(source, step):
        found = manifest.read(source, step, name)
        for file, entry in sorted(found.files.items()):
            if manifest.check_file(target, step, file, entry) is None:
                continue
            copy_shard(source, target, path(step, file), entry)
            if problem := manifest.check_file(target, step, file, entry):
                raise StorageError(f"not as it was copied: {problem}")
            copied += entry.bytes
        for last in (EVAL, name):
            with suppress(FileNotFoundError):  # most have no EVAL.json
                target.storage.write(path(step, last), source.storage.read(path(step, last)))
        manifest.read(target, step, name)
    return copied


def copy_shard(source: RunDir, target: RunDir, name: str, entry: FileEntry) -> None:
    """Copies a file of a checkpoint, of any size. Raises CheckpointCorrupt if the source's has another hash, StorageError."""
    hasher = xxhash.xxh3_128()
    with target.storage.create(name) as sink:
        for block in _blocks(source, name):
            hasher.update(block)
            write_whole(sink, block)
        if hasher.hexdigest() != entry.xxh3:
            raise CheckpointCorrupt(f"{source.uri}/{name}: its bytes are not those that were written")


def _blocks(source: RunDir, name: str) -> Iterator[memoryview]:
    """A file's bytes. A read error is raised as CheckpointCorrupt: the source is bad, not the target."""
    try:
        with source.storage.open(name) as stream:
            while block := memoryview(stream.read_buffer(READ_BYTES)):
                yield block
    except OSError as error:
        raise CheckpointCorrupt(f"{source.uri}/{name}: cannot be read: {error}") from error


class Mirrors:
    """Copies one run's checkpoints to its replicas, and verifies all of them; rank 0 has one. Only `close` waits for storage.

    `uris`: the replicas. `keep`: as in pruning, on each of them. `verify_every`: commits between two verifications of all bytes;
    None: never. `on_event` gets replica_saved, replica_failed, checkpoint_damaged, from threads.
    """

    def __init__(
        self,
        run: RunDir,
        uris: Sequence[str],
        *,
        keep: int,
        attempt: int,
        verify_every: int | None,
        on_event: Callable[[Event], None],
    ) -> None:
        self._run, self._uris, self._keep, self._attempt = run, list(uris), keep, attempt
        self._verify_every, self._on_event, self._commits = verify_every, on_event, 0
        self._copiers = [_Worker(f"raydist-replica-{n}", partial(self._sync, uri)) for n, uri in enumerate(uris)]
        self._verifier = _Worker("raydist-verify", self._verify) if verify_every is not None else None
        for copier in self._copiers:
            copier.wake()  # an earlier attempt may not have copied everything

    def committed(self) -> None:
        """To be called after each commit."""
        self._commits += 1
        for copier in self._copiers:
            copier.wake()
        if self._verifier is not None and self._verify_every is not None and self._commits % self._verify_every == 0:
            self._verifier.wake()

    def close(self, timeout_s: float) -> None:
        """Waits until the replicas have all checkpoints; an event reports those that do not in that time. 0: ends at once.

        With a timeout above 0 it also deletes the run's own old checkpoints that could not be deleted while they were copied. No
        save may be in flight.
        """
        if self._verifier is not None:
            self._verifier.end(last_round=False)
        for copier in self._copiers:
            copier.end(last_round=timeout_s > 0)
        deadline = time.monotonic() + timeout_s
        for uri, copier in zip(self._uris, self._copiers, strict=True):
            if timeout_s > 0 and not copier.over.wait(max(0.0, deadline - time.monotonic())):
                cause = f"still being copied {timeout_s:g} s after the end of training; the next start of this run continues it"
                self._say("replica_failed", replica=redact(uri), cause=cause)
        if timeout_s > 0 and self._copiers:
            self._prune()

    def _prune(self) -> None:
        try:
            if not fenced(self._run, self._attempt):
                retention.prune(self._run, self._keep, attempt=self._attempt)
        except Exception as error:  # it costs disk space, and no checkpoint
            self._say("note", text=f"old checkpoints could not be deleted: {_text(error)}")

    def _sync(self, uri: str) -> None:
        """One round: copies to the replica what it lacks, and prunes it by the run's rules."""
        try:
            replica = mounted(self._run, uri)
            if fenced(self._run, self._attempt):
                return  # another attempt decides now
            lineage = self._run.lineage()
            # Notes first: without them the replica would not know which of its manifests are void.
            attempts = self._run.storage.files(ATTEMPTS).keys()
            for name in attempts - replica.storage.files(ATTEMPTS).keys():
                replica.storage.write(name, self._run.storage.read(name))
            if attempts and replica.storage.local is not None and not _noted(self._run, replica):
                self._run.storage.write(_note(replica), json.dumps({"replica": replica.uri}).encode())
                replica.guard()
            there = replica.manifests(lineage)
            for step, name in reversed(self._run.manifests(lineage).items()):
                if there.get(step) != name:
                    self._copy(replica, uri, step, name)
            retention.prune(replica, self._keep, orphans=True, attempt=self._attempt)
        except Exception as error:  # a replica must not stop training
            self._say("replica_failed", replica=redact(uri), cause=_text(error))

    def _copy(self, replica: RunDir, uri: str, step: int, name: str) -> None:
        begun = time.monotonic()
        try:
            copied = copy(self._run, replica, step, name)
            retention.sweep(replica, manifest.read(replica, step, name, tensors=False))
        except CheckpointNotFound:
            return  # pruned meanwhile
        except CheckpointCorrupt as error:
            self._say("replica_failed", replica=redact(uri), step=step, cause=error.message)
            return
        seconds = round(time.monotonic() - begun, 3)
        self._say("replica_saved", replica=redact(uri), step=step, bytes=copied, seconds=seconds)

    def _verify(self) -> None:
        """Reads every checkpoint of the run and of its replicas, and repairs bad ones from a good copy."""
        places = [self._run]
        for uri in self._uris:
            with suppress(RaydistError, OSError):  # the copier reports a replica that cannot be reached
                places.append(mounted(self._run, uri))
        for place in places:
            try:
                for step, name in place.manifests(self._run.lineage()).items():
                    if self._verifier is None or self._verifier.ending or fenced(self._run, self._attempt):
                        return
                    with suppress(CheckpointNotFound), retention.leased(place, step):
                        if problems := manifest.verify(place, step):
                            self._mend(place, [p for p in places if p is not place], step, name, problems)
            except Exception as error:
                self._say("note", text=f"{place.uri}: its checkpoints could not be verified: {_text(error)}")

    def _mend(self, place: RunDir, others: Sequence[RunDir], step: int, name: str, problems: list[str]) -> None:
        mended = None
        for other in others:
            with suppress(RaydistError, OSError):  # bad or missing there: try the next place
                copy(other, place, step, name)
                mended = other.uri
                break
        file, _, cause = problems[0].partition(": ")
        self._say("checkpoint_damaged", step=step, file=file, cause=cause, mended_from=mended)

    def _say(self, kind: str, **data: Any) -> None:
        self._on_event(Event(kind, time.time(), data))


class _Worker:
    """A thread that does one round of work at each `wake`; calls during a round cause one more round."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self._work, self._wake = work, threading.Event()
        self.ending, self._last_round = False, False
        self.over = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def wake(self) -> None:
        self._wake.set()

    def end(self, last_round: bool) -> None:
        """Ends after one more round, or after the current one; does not wait for it."""
        self._last_round, self.ending = last_round, True
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            ending = self.ending
            if not ending or self._last_round:
                self._work()
            if ending:
                self.over.set()
                return


def _text(error: BaseException) -> str:
    return error.message if isinstance(error, RaydistError) else f"{type(error).__name__}: {error}"
