"""Which checkpoints are deleted, and how a checkpoint that is being read is protected.

Runs anywhere: plain python, no torch.

A reader writes a lease into the step's folder, then checks whether that folder is being pruned. The pruning process writes a mark,
then checks for leases. The second of the two sees the other's file: a leased folder is kept, and a marked one is not read.
Leases and marks expire, in case their process died. These are files: it works on any storage, without locks.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath
from typing import Any

from raydist.checkpoint import manifest
from raydist.checkpoint.manifest import path
from raydist.errors import CheckpointNotFound, StorageError
from raydist.parsing import DAMAGED, parse_json
from raydist.run.directory import CHECKPOINTS, RunDir, manifest_attempt, step_folder
from raydist.storage import Storage

LEASE, MARK = "lease-", "PRUNING"
_WRITTEN = re.compile(r"(?:\.tmp-)?(?:shard-\d+-of-\d+-|MANIFEST-)(\d+)\b.*")
"""A shard or a manifest, finished or not: the number is the attempt's."""
LEASE_S, MARK_S = 3600.0, 60.0
"""How long a lease and a mark are valid. No check for leases takes that long, and no restore of a checkpoint; other readers renew
their lease every RENEW_S."""
RENEW_S = 600.0


class Lease:
    """A reader's claim on one checkpoint, for LEASE_S seconds or until it is released."""

    def __init__(self, run: RunDir, step: int) -> None:
        """Raises CheckpointNotFound if that checkpoint is being pruned."""
        self._storage = run.storage
        self._name: str | None = path(step, f"{LEASE}{uuid.uuid4().hex[:12]}")
        steps = run.committed()
        if step not in steps:
            raise manifest.no_checkpoint(run, step, steps)
        gone = CheckpointNotFound(f"{run.uri}: the checkpoint of step {step} is being pruned", "take a newer one")
        try:
            self.renew()
        except StorageError:
            # A reader without write permission reads without protection; see docs/explanation/checkpoints.md.
            self._name = None
        if _fresh(run.storage, path(step, MARK)) or run.manifest(step) is None:
            self.release()
            raise gone

    def renew(self) -> None:
        """It is valid for LEASE_S from now. Raises StorageError."""
        if self._name is not None:
            self._storage.write(self._name, manifest.canonical({"until": time.time() + LEASE_S}))

    def release(self) -> None:
        """Deletes the lease. A second call does nothing."""
        if self._name is not None:
            self._storage.delete(self._name)
            self._name = None


@contextmanager
def leased(run: RunDir, step: int) -> Iterator[None]:
    """For the time of reading a checkpoint, however long. Raises CheckpointNotFound if it is being pruned."""
    lease, ended = Lease(run, step), threading.Event()

    def renew() -> None:
        while not ended.wait(RENEW_S):
            with suppress(StorageError):  # it is tried again long before the lease expires
                lease.renew()

    renewing = threading.Thread(target=renew, name="raydist-lease", daemon=True)
    renewing.start()
    try:
        yield
    finally:
        ended.set()
        renewing.join()  # a renewal in progress would write a released lease again
        lease.release()


def verified(run: RunDir, step: int | None = None) -> Iterator[dict[str, Any]]:
    """Reads every byte of each checkpoint, or of that of `step`: of each its `step`, whether it is `good`, and its `problems`.

    Raises CheckpointNotFound if there is none of `step`.
    """
    for number in run.committed() if step is None else [step]:
        try:
            with leased(run, number):
                problems = manifest.verify(run, number)
        except CheckpointNotFound:
            if step is not None:
                raise
            continue  # pruned since it was listed
        yield {"step": number, "good": not problems, "problems": problems}


def prune(
    run: RunDir,
    keep: int,
    *,
    orphans: bool = False,
    attempt: int | None = None,
    damaged: Callable[[str], object] | None = None,
    known: manifest.Known | None = None,
) -> list[int]:
    """Deletes all committed checkpoints except the `keep` newest, the best, and those being read. Returns their steps.

    `damaged`: reads every byte of what stays, and calls it with each problem; a damaged checkpoint stays, and does not count
    among the `keep`. None: what stays is not read, because the caller has just written the newest. `orphans`: also files of failed
    and killed saves; only for the process that saves to this run, because another process's save in flight looks the same.
    `attempt`: of the caller; files of a later attempt stay, because the caller may be cut off without knowing it. None: the
    command line. `known`: see `manifest.summary`.
    """
    assert keep >= 1, "the newest checkpoint is never pruned"
    rows = manifest.summary(run, known)
    newest = [r["step"] for r in rows]
    good = 0
    for count, step in enumerate(reversed(newest), start=1):
        problems = [] if damaged is None else manifest.verify(run, step)
        for problem in problems:
            assert damaged is not None
            damaged(problem)
        good += not problems
        if good == keep:
            newest = newest[-count:]
            break
    stay = {*newest, manifest.best_of(rows)}
    gone = [r["step"] for r in rows if r["step"] not in stay and _remove(run.storage, r["step"], attempt)]
    if orphans:
        committed = {step_folder(s) for s in run.committed()}
        for folder in run.storage.folders(CHECKPOINTS):
            name = f"{CHECKPOINTS}/{folder}"
            if name not in committed:
                _clear(run.storage, name, attempt)
    return gone


def sweep(run: RunDir, found: manifest.Manifest) -> None:
    """Deletes shards and manifests of earlier saves, failed or void, from a committed checkpoint's folder."""
    for name in sorted(run.storage.files(step_folder(found.step))):
        last = PurePosixPath(name).name
        by = _attempt(last)
        # A manifest comes before the shards that it names: M sorts before s.
        stale = last not in found.files if last.startswith("shard-") else (by or found.attempt) < found.attempt
        if stale and (by or 0) <= found.attempt:
            run.storage.delete(name)


def _attempt(name: str) -> int | None:
    """The attempt that wrote the shard or manifest of that name; None for any other file."""
    match = _WRITTEN.fullmatch(name)
    return int(match[1]) if match else None


def _clear(storage: Storage, folder: str, attempt: int | None) -> None:
    """Deletes files of attempts up to `attempt` (None: all) in a checkpoint's folder, manifests first; then the empty folder."""
    names = storage.files(folder, unfinished=True)
    for name in sorted(names, key=lambda n: (manifest_attempt(n) is None, n)):
        by = _attempt(PurePosixPath(name).name)
        if attempt is None or by is None or by <= attempt:
            storage.delete(name)
    storage.delete_empty(folder)


def _remove(storage: Storage, step: int, attempt: int | None) -> bool:
    mark = path(step, MARK)
    storage.write(mark, manifest.canonical({"until": time.time() + MARK_S}))
    if any(_fresh(storage, n) for n in storage.files(step_folder(step)) if PurePosixPath(n).name.startswith(LEASE)):
        storage.delete(mark)
        return False
    # The manifest is deleted first: without it this is not a checkpoint, even if the process dies before the shards are deleted.
    _clear(storage, step_folder(step), attempt)
    return True


def _fresh(storage: Storage, name: str) -> bool:
    try:
        return float(parse_json(storage.read(name))["until"]) > time.time()
    except (*DAMAGED, FileNotFoundError):  # both are written as a whole
        return False
