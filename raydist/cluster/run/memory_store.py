"""Snapshots of the training state in the memory of one node: serves them, and copies them to a second node.

`MemoryStore` runs in: one zero-CPU actor on each node that has ranks, owned by the driver; on a private Ray, which is one node,
in the driver itself. It handles bytes only: never imports torch. Imports ray in its functions only.

    ranks --files, bell--> MemoryStore of node A --copy(step, name)--> MemoryStore of node B (A's buddy) --read pieces--> A

A node's buddy is the node that keeps copies of its files. Training never waits for any of this.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raydist.checkpoint import memory_layout
from raydist.checkpoint.manifest import Manifest
from raydist.checkpoint.memory_layout import BELL, BUDDY, MESSAGE_ROOM, SHM, Shard
from raydist.cluster.run.memory_checkpoint_recovery import Copy, Fetch, Inventory
from raydist.run.directory import CHECKPOINTS, manifest_attempt, step_folder

PIECE_BYTES = 8 << 20
"""Bytes of one message between nodes."""
_PIECE_S = 20.0

# Waits until the memory store's process, the only one that holds the pipe, has ended, and then until no rank uses the folder.
_CLEANER = """
import fcntl, os, shutil, sys
if os.fork():
    os._exit(0)
os.setsid()
sys.stdin.buffer.read()
with open(sys.argv[1] + "/lock", "a") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


class MemoryStore:
    """The part of one node: learns what its ranks write, has the buddy copy it, serves and fetches files. Any thread.

    The constructor raises OSError if the folder cannot be made.
    """

    def __init__(self, folder: str) -> None:
        memory_layout.remove_unused()
        self._use = memory_layout.Use(folder)
        self._folder = Path(folder)
        cleaner = [sys.executable, "-I", "-S", "-c", _CLEANER, folder]
        quiet = subprocess.DEVNULL
        # It has its own session, and its parent has exited: it outlives this process.
        self._cleaner = subprocess.Popen(cleaner, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet)
        self._cleaner.wait()
        self._me: Any = None
        self._buddy: Any = None
        self._ranks: frozenset[int] = frozenset()
        self._world_size = 0
        self._closed = threading.Event()
        self._read: dict[tuple[int, int], set[str]] = {}
        """(step, attempt) -> shards of its ranks that were read to their end; the newest two."""
        self._reading = threading.Lock()
        self._wanted: queue.Queue[tuple[Any, int, str, int | None] | None] = queue.Queue()
        (self._folder / BELL).unlink(missing_ok=True)
        self._bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._bell.bind(str(self._folder / BELL))
        for what in (self._receive, self._copy):
            threading.Thread(target=what, name="raydist-memory", daemon=True).start()

    def closed(self) -> None:
        """Returns when it is closed: a call that fails earlier says that the process was killed."""
        self._closed.wait()

    def link(self, me: Any, buddy: Any, ranks: Sequence[int], world_size: int) -> None:
        """`me`: its own handle. `buddy`: the MemoryStore that copies its files (None: no other node). `ranks`: its node's, of
        `world_size`.
        """
        another = buddy is not None and buddy != self._buddy
        self._me, self._buddy = me, buddy
        self._ranks, self._world_size = frozenset(ranks), world_size
        if buddy is None:
            (self._folder / memory_layout.SENT).unlink(missing_ok=True)
        if another:  # also after a restart of this MemoryStore: it has missed the messages of its bell socket
            memory_layout.tell_sent(self._folder, 0, 0)
            for path in sorted(self._all(CHECKPOINTS)):
                self._offer(_step(path), path.name, None)

    def inventory(self, *link: Any) -> Inventory:
        """The files in this node's memory. `link`: as for `link`, which it calls first; without: as before."""
        if link:
            self.link(*link)
        files: dict[tuple[int, str], int] = {}
        buddy: dict[tuple[int, str], int] = {}
        copies = []
        for folder, found in ((CHECKPOINTS, files), (f"{BUDDY}/{CHECKPOINTS}", buddy)):
            for path in self._all(folder):
                with contextlib.suppress(OSError, ValueError):  # overwritten meanwhile, or damaged
                    if Shard.parse(path.name):
                        found[_step(path), path.name] = path.stat().st_size
                    elif manifest_attempt(path.name) is not None:
                        copies.append(_copy_of(path.name, Manifest.loads(path.read_bytes())))
        return Inventory(files, copies, {file: size for file, size in buddy.items() if file not in files})

    def read(self, step: int, name: str, start: int) -> bytes:
        """At most PIECE_BYTES of a file, from byte `start`. Raises FileNotFoundError, and OSError if shared memory is full."""
        _check_room()
        with self._path(step, name).open("rb", buffering=0) as file:
            file.seek(start)
            piece = file.read(PIECE_BYTES)
        if not piece:
            self._sent(step, name)
        return piece

    def copy(self, source: Any, step: int, name: str, kept: int | None) -> None:
        """Soon copies a file of `source`, another MemoryStore. `kept`: the newest step that is complete there."""
        self._wanted.put((source, step, name, kept))

    def fetch(self, step: int, files: Sequence[Fetch], sources: Mapping[str, Any]) -> list[str]:
        """Fetches these files into its own folder, checks their hashes, and returns a line for each error. `sources`: node -> its
        MemoryStore.

        The buddy copies the files of this node's ranks, so that they are on two nodes again.
        """
        problems = []
        for file in files:
            path = self._folder / step_folder(step) / file.name
            if path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                there = self._folder / BUDDY / step_folder(step) / file.name
                if there.exists():
                    with contextlib.suppress(FileExistsError):
                        os.link(there, path)
                else:
                    _pull(sources[file.source], step, file.name, path)
                if self._mine(file.name):
                    self._offer(step, file.name, None)
            except Exception as error:
                problems.append(f"{file.name}: {type(error).__name__}: {error}")
        return problems

    def close(self) -> None:
        """Removes the folder. If a rank still uses it, the cleaner removes it when that rank has ended."""
        self._closed.set()
        memory_layout.ring(self._folder)
        self._wanted.put(None)
        self._use.close()
        memory_layout.remove(self._folder, wait=False)
        assert self._cleaner.stdin is not None
        self._cleaner.stdin.close()

    # --- inside

    def _all(self, folder: str) -> Iterable[Path]:
        return memory_layout.files(self._folder / folder)

    def _path(self, step: int, name: str) -> Path:
        own = self._folder / step_folder(step) / name
        return own if own.exists() else self._folder / BUDDY / step_folder(step) / name

    def _receive(self) -> None:
        with self._bell:
            while not self._closed.is_set():
                written = json.loads(self._bell.recv(1 << 16) or b"{}")
                if written and not self._closed.is_set():
                    self._offer(written["step"], written["name"], written["kept"])
                    if written["kept"] == written["step"]:
                        self._prune(written["step"], written["name"])

    def _offer(self, step: int, name: str, kept: int | None) -> None:
        if self._buddy is not None:
            self._buddy.copy.remote(self._me, step, name, kept)

    def _sent(self, step: int, name: str) -> None:
        """A file was read to its end: by the buddy, or after a restart by another node, which does not matter here."""
        shard = Shard.parse(name)
        if shard is None or shard.rank not in self._ranks:
            return
        with self._reading:
            names = self._read.setdefault((step, shard.attempt), set())
            names.add(name)
            if len(names) == len(self._ranks):
                memory_layout.tell_sent(self._folder, step, shard.attempt)
            for old in list(self._read)[:-2]:
                del self._read[old]

    def _prune(self, kept: int, name: str) -> None:
        """Once there is a newer snapshot, of which `name` is a file, removes those that were fetched for a restart, and those of
        ranks that have left: they are of earlier attempts.
        """
        attempt = _attempt(name)
        for path in self._all(CHECKPOINTS):
            if _step(path) < kept and _attempt(path.name) != attempt and not self._mine(path.name):
                path.unlink(missing_ok=True)

    def _mine(self, name: str) -> bool:
        """Whether a rank of this node writes that file of a snapshot."""
        shard = Shard.parse(name)
        if shard is None:
            return manifest_attempt(name) is not None and 0 in self._ranks
        return shard.rank in self._ranks and shard.world_size == self._world_size

    def _copy(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            source, step, name, kept = wanted
            with contextlib.suppress(Exception):  # overwritten meanwhile, its node is gone, or there is no room
                path = self._folder / BUDDY / step_folder(step) / name
                if kept != step:  # at most two at a time; the newest complete one is removed last
                    self._forget(name, {kept, step})
                if not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    _pull(source, step, name, path)
                if kept == step:
                    self._forget(name, {step})

    def _forget(self, name: str, stay: set[int | None]) -> None:
        """Removes the copies of the same rank's shard, or of the manifest, except those of the steps in `stay`. None in it:
        removes none.
        """
        shard = Shard.parse(name)
        for path in self._all(f"{BUDDY}/{CHECKPOINTS}") if None not in stay else ():
            old = Shard.parse(path.name)
            same = old.rank == shard.rank if old and shard else old is shard
            if same and _step(path) not in stay:
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    path.parent.rmdir()


def _check_room() -> None:
    if (free := shutil.disk_usage(SHM).free) < MESSAGE_ROOM:
        raise OSError(errno.ENOSPC, f"{free >> 20} MiB are free, {MESSAGE_ROOM >> 20} are needed", str(SHM))


def _pull(source: Any, step: int, name: str, path: Path) -> None:
    """Reads a file of another MemoryStore in pieces, and renames it to `path` when its hash is the one in its name."""
    part = path.with_name(f".tmp-{uuid.uuid4().hex[:8]}")
    try:
        size = 0
        with part.open("xb", buffering=0) as file:
            while piece := _piece(source, step, name, size):
                rest = memoryview(piece)
                while rest:
                    rest = rest[file.write(rest) :]
                size += len(piece)
        shard = Shard.parse(name)
        if shard is None:
            Manifest.loads(part.read_bytes())
        elif memory_layout.digest(part) != shard.xxh3:
            raise ValueError("it does not have the hash that its name says")
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


def _piece(source: Any, step: int, name: str, start: int) -> bytes:
    """See `MemoryStore.read`."""
    import ray

    _check_room()
    piece: bytes = ray.get(source.read.remote(step, name, start), timeout=_PIECE_S)
    return piece


def _attempt(name: str) -> int | None:
    """The attempt that wrote this file of a snapshot."""
    return shard.attempt if (shard := Shard.parse(name)) is not None else manifest_attempt(name)


def _step(path: Path) -> int:
    return int(path.parent.name.removeprefix("step-"))


def _copy_of(name: str, found: Manifest) -> Copy:
    files = {file: entry.bytes for file, entry in found.files.items()}
    shared = frozenset(memory_layout.shared_files(found))
    return Copy(found.step, found.attempt, name, found.world_size, files, shared, found.plain[memory_layout.PEERS])


def start_actor(folder: str, node: str) -> Any:
    """Starts a MemoryStore on that node; it ends with this process. Ray restarts it if it is killed."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    actor = ray.remote(MemoryStore).options(num_cpus=0, max_restarts=-1, max_concurrency=9, scheduling_strategy=there)
    return actor.remote(folder)
