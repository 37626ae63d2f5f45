"""Copies of the training state in the nodes' memory: kept on a second node, found after a failure, brought to who needs them.

`MemoryStore` runs in: one zero-CPU actor on each node that has ranks, owned by the driver; on a private Ray, which is one node, in
the driver itself. Bytes only: never imports torch. `MemoryCheckpoints` runs in: the driver. Imports ray in its functions only.

    ranks --files, bell--> MemoryStore of node A --copy(step, name)--> MemoryStore of node B (A's buddy) --read pieces--> A
    driver: MemoryCheckpoints.job(ranks) = inventories -> memory_checkpoint_recovery.place -> fetch on the nodes that lack something

Training never waits for any of this. What fails here makes a restart go on from storage.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raydist.checkpoint import memory_layout
from raydist.checkpoint.manifest import Manifest
from raydist.checkpoint.memory_layout import BELL, BUDDY, Shard
from raydist.cluster.run.memory_checkpoint_recovery import Copy, Fetch, Inventory, place
from raydist.run.directory import CHECKPOINTS, RunDir, manifest_attempt, step_folder

PIECE_BYTES = 8 << 20
"""Bytes of one message between nodes."""
_PIECE_S = 20.0
_ASK_S = 5.0
_FETCH_S = 60.0
_LINK_S = 5.0
_USES = 2
"""Attempts that may go on from one snapshot without making a newer one; the next takes storage."""

# Waits for the end of a pipe that only the memory store's process holds, then until nobody uses the folder: ranks may outlive a
# MemoryStore.
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
    """One node's part: sees what its ranks write, has it copied to the buddy, hands out and fetches files. Any thread.

    Raises OSError where the folder cannot be made.
    """

    def __init__(self, folder: str) -> None:
        memory_layout.remove_unused()
        self._use = memory_layout.Use(folder)
        self._folder = Path(folder)
        cleaner = [sys.executable, "-I", "-S", "-c", _CLEANER, folder]
        quiet = subprocess.DEVNULL
        # In a session of its own, and its parent gone: it outlives this process.
        self._cleaner = subprocess.Popen(cleaner, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet)
        self._cleaner.wait()
        self._me: Any = None
        self._buddy: Any = None
        self._ranks: frozenset[int] = frozenset()
        self._world_size = 0
        self._closed = False
        self._read: dict[tuple[int, int], set[str]] = {}
        """(step, attempt) -> shards of its ranks that have been read to their end; of the newest two."""
        self._reading = threading.Lock()
        self._wanted: queue.Queue[tuple[Any, int, str, int | None] | None] = queue.Queue()
        (self._folder / BELL).unlink(missing_ok=True)
        self._bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._bell.bind(str(self._folder / BELL))
        for what in (self._hear, self._copy):
            threading.Thread(target=what, name="raydist-memory", daemon=True).start()

    def link(self, me: Any, buddy: Any, ranks: Sequence[int], world_size: int) -> None:
        """Who it is, to whom its node's copies go (None: nobody), and which of how many ranks are here."""
        another = buddy is not None and (self._buddy is None or buddy._actor_id != self._buddy._actor_id)
        self._me, self._buddy = me, buddy
        self._ranks, self._world_size = frozenset(ranks), world_size
        if buddy is None:
            (self._folder / memory_layout.SENT).unlink(missing_ok=True)
        if (
            another
        ):  # or this MemoryStore stands in for one that was killed: what its bell said in between was heard by nobody
            memory_layout.tell_sent(self._folder, 0, 0)
            for path in sorted(self._all(CHECKPOINTS)):
                self._offer(_step(path), path.name, None)

    def inventory(self) -> Inventory:
        """What is here."""
        files: dict[tuple[int, str], int] = {}
        copies = []
        for path in [*self._all(CHECKPOINTS), *self._all(f"{BUDDY}/{CHECKPOINTS}")]:
            with contextlib.suppress(OSError, ValueError):  # written over meanwhile, or damaged
                if Shard.parse(path.name):
                    files.setdefault((_step(path), path.name), path.stat().st_size)
                elif manifest_attempt(path.name) is not None:
                    copies.append(_copy_of(path.name, Manifest.loads(path.read_bytes())))
        return Inventory(files, copies)

    def read(self, step: int, name: str, start: int) -> bytes:
        """At most PIECE_BYTES of a file, from byte `start`. Raises FileNotFoundError."""
        with self._path(step, name).open("rb", buffering=0) as file:
            file.seek(start)
            piece = file.read(PIECE_BYTES)
        if not piece:
            self._sent(step, name)
        return piece

    def copy(self, source: Any, step: int, name: str, kept: int | None) -> None:
        """Keeps a copy of a file that `source`, another MemoryStore, has; soon. `kept`: the newest step known to be whole there."""
        self._wanted.put((source, step, name, kept))

    def fetch(self, step: int, files: Sequence[Fetch], sources: Mapping[str, Any]) -> list[str]:
        """Has these files in its own folder, hash checked, when it returns; gives what went wrong. `sources`: node -> its
        MemoryStore.

        What is of its own ranks goes on to its buddy, so that it is on two nodes again.
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
        """Removes the folder, unless a rank still uses it: then the cleaner does when that one has ended."""
        self._closed = True
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

    def _hear(self) -> None:
        with self._bell:
            while not self._closed:
                said = json.loads(self._bell.recv(1 << 16) or b"{}")
                if said and not self._closed:
                    self._offer(said["step"], said["name"], said["kept"])
                    if said["kept"] == said["step"]:
                        self._prune(said["step"])

    def _offer(self, step: int, name: str, kept: int | None) -> None:
        if self._buddy is not None:
            self._buddy.copy.remote(self._me, step, name, kept)

    def _sent(self, step: int, name: str) -> None:
        """Somebody has all of a file: the buddy, but after a restart, when nobody asks."""
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

    def _prune(self, kept: int) -> None:
        """What was fetched for a restart, or is of ranks that left, goes once there is a newer snapshot."""
        for path in self._all(CHECKPOINTS):
            if _step(path) < kept and not self._mine(path.name):
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
            with contextlib.suppress(Exception):  # written over meanwhile, or its node is gone: the next one will do
                path = self._folder / BUDDY / step_folder(step) / name
                if kept != step:  # two at a time at most; the newest whole one goes last
                    self._forget(name, {kept, step})
                if not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    _pull(source, step, name, path)
                if kept == step:
                    self._forget(name, {step})

    def _forget(self, name: str, stay: set[int | None]) -> None:
        """Drops what is kept of the same rank's shard, or manifest, but of the steps that stay; where one is None, nothing."""
        shard = Shard.parse(name)
        for path in self._all(f"{BUDDY}/{CHECKPOINTS}") if None not in stay else ():
            old = Shard.parse(path.name)
            same = old.rank == shard.rank if old and shard else old is shard
            if same and _step(path) not in stay:
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    path.parent.rmdir()


def _pull(source: Any, step: int, name: str, path: Path) -> None:
    """A file from another MemoryStore, piece by piece; in place once it has the hash that its name says."""
    import ray

    part = path.with_name(f".tmp-{uuid.uuid4().hex[:8]}")
    try:
        size = 0
        with part.open("xb", buffering=0) as file:
            while piece := ray.get(source.read.remote(step, name, size), timeout=_PIECE_S):
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


def _step(path: Path) -> int:
    return int(path.parent.name.removeprefix("step-"))


def _copy_of(name: str, found: Manifest) -> Copy:
    files = {file: entry.bytes for file, entry in found.files.items()}
    shared = frozenset(memory_layout.shared_files(found))
    return Copy(found.step, found.attempt, name, found.world_size, files, shared, found.plain[memory_layout.PEERS])


class MemoryCheckpoints:
    """All memory stores of a run. Nothing of it raises: where it cannot help, `job` names no snapshot.

    `private`: all is on this host, and no actor is needed. `note` says what went wrong, in a line.
    """

    def __init__(self, run: RunDir, *, private: bool, note: Callable[[str], None]) -> None:
        self._run, self._private, self._note = run, private, note
        self.folder = memory_layout.new_folder()
        self._nodes: dict[str, Any] = {}
        self._links: dict[str, tuple[Any, Any, list[int], int]] = {}
        self._used: dict[int, int] = {}
        self._ended = threading.Event()
        self._lock = threading.Lock()
        if not private:
            threading.Thread(target=self._relink, name="raydist-memory-links", daemon=True).start()

    def job(self, ranks: Mapping[int, str]) -> dict[str, Any]:
        """What every rank is told, VaultJob's fields; all that it needs is then on its node. `ranks`: rank -> node id."""
        job: dict[str, Any] = {"folder": self.folder, "step": None, "manifest": None}
        try:
            fresh = self._start(ranks)
            if fresh != set(self._nodes):
                job |= self._chosen(ranks)
            self._leave(set(ranks.values()))
        except Exception as error:
            self._note(f"no copy in memory is gone on from: {type(error).__name__}: {error}")
        return job

    def close(self) -> None:
        """The run is over: all copies go."""
        self._ended.set()
        with self._lock:
            nodes, self._nodes = self._nodes, {}
        if self._private:
            for memory_store in nodes.values():
                memory_store.close()
            return
        import ray

        if nodes:
            ray.wait(
                [memory_store.close.remote() for memory_store in nodes.values()], num_returns=len(nodes), timeout=_ASK_S
            )
        for memory_store in nodes.values():
            ray.kill(memory_store)

    # --- inside

    def _start(self, ranks: Mapping[int, str]) -> set[str]:
        """A MemoryStore on each node that has ranks, linked in a ring; the nodes whose MemoryStore is new."""
        fresh = set(ranks.values()) - set(self._nodes)
        for node in fresh:
            self._nodes[node] = MemoryStore(self.folder) if self._private else _actor(self.folder, node)
        ring = sorted(set(ranks.values()))
        with self._lock:
            self._links = {}
            for node, after in zip(ring, [*ring[1:], *ring[:1]], strict=True):
                mine = [rank for rank, at in ranks.items() if at == node]
                buddy = self._nodes[after] if after != node else None
                self._links[node] = (self._nodes[node], buddy, mine, len(ranks))
        self._link()
        return fresh

    def _link(self) -> None:
        with self._lock:
            for memory_store, *rest in self._links.values():
                if self._private:
                    memory_store.link(None, *rest)
                else:
                    memory_store.link.remote(memory_store, *rest)

    def _relink(self) -> None:
        """A MemoryStore that was killed comes back, and does not know its buddy."""
        while not self._ended.wait(_LINK_S):
            with contextlib.suppress(Exception):
                self._link()

    def _chosen(self, ranks: Mapping[int, str]) -> dict[str, Any]:
        committed, lineage = self._run.newest_step(), self._run.lineage()
        inventories = self._ask({node: ("inventory", ()) for node in self._alive()}, _ASK_S)
        found = place(
            inventories,
            ranks,
            after=committed,
            counts=lambda copy: (
                lineage.voided_by(copy.attempt, copy.step) is None and self._used.get(copy.step, 0) < _USES
            ),
        )
        if found is None:
            return {}
        step, manifest = found.copy.step, found.copy.manifest
        calls = {}
        for node, own in found.fetches.items():
            wanted = [*found.common, *own]
            if node == ranks[0]:
                wanted.append(Fetch(manifest, 0, found.manifest_from))
            has = inventories[node].files if node in inventories else {}
            if any((step, f.name) not in has for f in wanted) or len(self._nodes) > 1:
                sources = {f.source: self._nodes[f.source] for f in wanted if f.source != node}
                calls[node] = ("fetch", (step, wanted, sources))
        if self._private:
            calls = {}  # all is where it was
        answers = self._ask(calls, _FETCH_S)
        problems = [p for problems in answers.values() for p in problems]
        problems += [f"node {node} does not answer" for node in calls if node not in answers]
        if problems:
            self._note(f"the copy in memory of step {step} is not gone on from: {problems[0]}")
            return {}
        self._used[step] = self._used.get(step, 0) + 1
        return {"step": step, "manifest": manifest}

    def _leave(self, nodes: set[str]) -> None:
        """Nothing stays where there are no ranks: what was needed of it has been fetched."""
        left = [self._nodes.pop(node) for node in self._nodes.keys() - nodes]
        if left:
            import ray

            for memory_store in left:
                ray.kill(memory_store)  # its cleaner removes the folder

    def _alive(self) -> set[str]:
        if self._private:
            return set(self._nodes)
        import ray

        return set(self._nodes) & {node["NodeID"] for node in ray.nodes() if node["Alive"]}

    def _ask(self, calls: Mapping[str, tuple[str, Sequence[Any]]], timeout_s: float) -> dict[str, Any]:
        """node -> what its MemoryStore answers; those that do not in time, or cannot, are left out."""
        if self._private:
            return {node: getattr(self._nodes[node], method)(*given) for node, (method, given) in calls.items()}
        import ray
        from ray.exceptions import RayError

        refs = {getattr(self._nodes[node], method).remote(*given): node for node, (method, given) in calls.items()}
        answers = {}
        if refs:
            done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
            for ref in done:
                with contextlib.suppress(RayError):
                    answers[refs[ref]] = ray.get(ref)
        return answers


def _actor(folder: str, node: str) -> Any:
    """A MemoryStore on that node; gone with this process. Comes back by itself if it is killed."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    actor = ray.remote(MemoryStore).options(num_cpus=0, max_restarts=-1, max_concurrency=8, scheduling_strategy=there)
    return actor.remote(folder)
