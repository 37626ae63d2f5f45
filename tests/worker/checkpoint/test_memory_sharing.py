"""Ranks on several nodes, each with a folder of its own, send each other the files of a copy in memory that all of them read."""

from __future__ import annotations

import json
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from raydist.checkpoint import memory_layout
from raydist.checkpoint.manifest import FileEntry, Manifest
from raydist.checkpoint.memory_layout import BELL, BUDDY, PEERS, SHARED, Shard, Use
from raydist.cluster.run.memory_checkpoint_recovery import place
from raydist.cluster.run.memory_store import MemoryStore
from raydist.run.directory import step_folder
from raydist.worker.checkpoint import memory_manager, memory_sharing
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.distributed import Rank
from tests.training import run
from tests.worker.checkpoint import test_memory_manager as attempts
from tests.worker.checkpoint.test_memory_manager import dataset

__all__ = ["dataset"]
NODES = "aabcd"
"""Of five ranks."""
SIZE = 2500


@pytest.fixture
def folders() -> Iterator[dict[str, Path]]:
    """A memory store's folder of each node."""
    used = {node: Use(memory_layout.new_folder()) for node in sorted({*NODES})}
    yield {node: use.folder for node, use in used.items()}
    for use in used.values():
        use.close()
        memory_layout.remove(use.folder, wait=True)


def content(rank: int) -> bytes:
    return bytes((rank + i * i) % 251 for i in range(SIZE * (rank != 3)))


def copy() -> Manifest:
    """A copy of five ranks. Rank 3 has saved nothing."""
    hashes = [xxhash.xxh3_128_hexdigest(content(r)) for r in range(5)]
    files = {Shard(r, 5, 1, xxh3).name: FileEntry(len(content(r)), xxh3) for r, xxh3 in enumerate(hashes)}
    return Manifest(20, 5, 1, 0.0, "", files, {}, {SHARED: [], PEERS: []})


def put(folder: Path, rank: int, buddy: bool = False, data: bytes | None = None) -> Path:
    path = folder / (BUDDY if buddy else "") / step_folder(20) / list(copy().files)[rank]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content(rank) if data is None else data)
    return path


def spread(rank: Rank, folders: dict[str, str], full: str = "") -> tuple[list[str], list[str]]:
    """(the problems, the names of files that the bell of this node was told). `full`: a node whose files cannot become long."""
    memory_sharing.PIECE_BYTES = 1000
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    folder, found = Path(folders[NODES[rank.rank]]), copy()
    names = sorted(found.files)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
        if first := NODES.index(NODES[rank.rank]) == rank.rank:
            bell.bind(str(folder / BELL))
            bell.setblocking(False)
        every = gather_json([NODES[rank.rank], memory_sharing.held(folder, found, names)], rank.control)
        if NODES[rank.rank] == full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
        try:
            problems = memory_sharing.spread(folder, found, names, every, rank.rank, rank.control)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        told = []
        while first:
            try:
                told.append(json.loads(bell.recv(1 << 16))["name"])
            except BlockingIOError:
                break
    return problems, told


def there(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / step_folder(20)).iterdir()}


def test_every_node_gets_every_file(ranks: Any, folders: dict[str, Path]) -> None:
    """In several pieces, over more than one rank, also an empty one. A file that a node keeps as a buddy is not sent to it. Its
    memory store is told of a file that arrives for one of the node's ranks, so that the buddy copies it."""
    for rank in (0, 1, 2, 3):
        put(folders[NODES[rank]], rank)
    put(folders["b"], 4, buddy=True)
    put(folders["d"], 4, data=content(4)[:-1])
    results = run(ranks, spread, 5, {node: str(folder) for node, folder in folders.items()})
    names = list(copy().files)
    for folder in folders.values():
        assert there(folder) == {names[r]: content(r) for r in range(5)}
    assert [problems for problems, _ in results] == [[]] * 5
    assert [told for _, told in results] == [[], [], [], [], [names[4]]]
    assert (folders["b"] / step_folder(20) / names[4]).stat().st_nlink == 2


def test_a_damaged_file_is_not_kept(ranks: Any, folders: dict[str, Path]) -> None:
    """Every node says so, and none has it, nor a part of it. The other files arrive."""
    for rank in range(5):
        put(folders["a"], rank, data=content(2)[:-1] + b"x" if rank == 2 else None)
    results = run(ranks, spread, 5, {node: str(folder) for node, folder in folders.items()})
    names = list(copy().files)
    assert [[names[2] in problem for problem in problems] for problems, _ in results] == [[True], [], *[[True]] * 3]
    for node in "bcd":
        assert there(folders[node]) == {names[r]: content(r) for r in range(5) if r != 2}


def test_a_node_that_cannot_write_sends_on(ranks: Any, folders: dict[str, Path]) -> None:
    """It reports the error, and those after it get the file all the same."""
    put(folders["a"], 0)
    (folders["b"] / "checkpoints").touch()
    results = run(ranks, spread, 5, {node: str(folder) for node, folder in folders.items()}, "c")
    assert [len(problems) for problems, _ in results] == [0, 0, 1, 1, 0]
    assert [*(folders["c"] / step_folder(20)).iterdir()] == []
    for node in "ad":
        assert [*there(folders[node])] == [*copy().files][:1]


def trained(rank: Rank, folders: list[str], job: dict[str, Any], *attempt: Any) -> Any:
    """An attempt of ranks that are on a node each."""
    memory_manager._node = lambda: str(rank.rank)  # type: ignore[assignment]
    spec, path, number, *kill = attempt
    return attempts.trained(rank, spec, path, {**job, "folder": folders[rank.rank]}, number, *kill)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_killed_rank_among_nodes(ranks: Any, dataset: str, tmp_path: Path, strategy: str) -> None:
    """Two ranks on two nodes resume from the copy whose files only their own nodes have, with the bits of an undisturbed run."""
    spec = attempts.spec_of(dataset, strategy)
    expected, _ = run(ranks, attempts.trained, 2, spec, str(tmp_path / "calm"), None, 1)[0]
    stores = [MemoryStore(memory_layout.new_folder()) for _ in range(2)]
    folders, path = [str(store._folder) for store in stores], str(tmp_path / "killed")
    try:
        died = ranks.run(trained, 2, folders, {}, spec, path, 1, (1, 8))
        assert isinstance(died[1], ChildProcessError)
        found = place({str(n): store.inventory() for n, store in enumerate(stores)}, {0: "0", 1: "1"}, after=4)
        assert found is not None
        assert found.fetches == {}
        job = {"step": found.copy.step, "manifest": found.copy.manifest}
        steps, events = run(ranks, trained, 2, folders, job, spec, path, 2)[0]
    finally:
        for store in stores:
            store.close()
    assert [(e["step"], e["source"]) for e in events if e["kind"] == "resumed"] == [(6, "memory")]
    assert attempts.exact(steps) == attempts.exact(expected)[6:]
    assert attempts.weights(tmp_path / "killed") == attempts.weights(tmp_path / "calm")
