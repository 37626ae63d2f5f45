"""The work of the control plane grows with the number of ranks, not with its square: operations are counted, not seconds.

benchmarks/scale.py and benchmarks/simulated.py measure seconds, for 10,000 ranks.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raydist.checkpoint import manifest, memory_layout
from raydist.checkpoint.manifest import Chunk, FileEntry, Manifest, TensorEntry
from raydist.checkpoint.memory_layout import PEERS, SHARED, Shard
from raydist.cluster import nodes
from raydist.cluster.run import memory_checkpoints
from raydist.cluster.run.coordinator import Coordinator
from raydist.cluster.run.memory_checkpoint_recovery import Copy, Inventory, place
from raydist.cluster.run.memory_checkpoints import MemoryCheckpoints
from raydist.cluster.run.root_cause import rank_error, root_cause
from raydist.diagnosis._hang import RankView, judge
from raydist.run.directory import RunDir, begin_attempt, manifest_name, step_folder

PER_NODE = 8
SMALL = 64
TIMES = 4
SLACK = 1.5
"""How much more than in proportion: for logarithms, and sets that are built in one size only. A square would be 4 here."""
DIED = {
    "died": {"pid": 7, "node_ip": "10.0.0.1", "how": "SIGKILL", "starved": "", "ordered": False},
    "at": 2.0,
    "silent_s": 0.0,
}


class Name(str):
    """A node's id, whose comparisons are operations that are counted."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True

    def __hash__(self) -> int:
        return str.__hash__(self)


def operations(work: Callable[[], object]) -> int:
    """Calls of Python and C functions; turns of generators are calls, too."""
    count = 0

    def called(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def node_of(rank: int) -> Name:
    return Name(f"n{rank // PER_NODE:04d}")


def lost_peer(rank: int) -> dict[str, Any]:
    """The report of a rank that has lost a connection."""
    facts = {"rank": rank, "type_name": "RuntimeError", "message": "Connection closed by peer", "traceback": ""}
    return {"error": {**facts, "at": 3.0, "bases": ["RuntimeError"]}, "at": 3.0, "silent_s": 0.0}


async def attempts(world: int) -> None:
    """A group starts; a rank dies and all others lose a connection; the next attempt starts; it ends for a node that is lost."""
    made = Coordinator()
    await made.open(1, world)
    offers = [
        {"node": node_of(n), "local_rank": n % PER_NODE, "host": "h", "port": 1, "placement_group": "p"}
        for n in range(world)
    ]

    def asked(seen: int) -> list[asyncio.Task[Any]]:
        return [asyncio.create_task(made.next(1, n, seen, offers[n])) for n in range(world)]

    waiting = asked(1)
    await made.gathered()
    for attempt in (1, 2):
        await made.places(world)
        await made.begin(attempt, {}, world)
        orders = await asyncio.gather(*waiting)
        assert all(order["do"] == "train" for order in orders)
        waiting = asked(orders[0]["number"])
        result = asyncio.create_task(made.result(attempt))
        await asyncio.sleep(0)
        if attempt == 2:
            for n in range(PER_NODE):
                await made.agent_died(1, n, {"type_name": "NodeDied", "message": "gone", "kind": "node_died"})
            killed = (await asyncio.gather(*waiting))[-1]
            assert killed["do"] == "kill"
        for rank in range(world):
            await made.ended(1, rank, attempt, DIED if rank == world // 2 else lost_peer(rank))
        reports = await result
        assert len(reports) == (2 if attempt == 1 else 1 + PER_NODE + 1)
        errors = [error for rank, report in reports.items() if (error := rank_error(rank, report)) is not None]
        assert root_cause(errors).kind == ("node_died" if attempt == 2 else "worker_died")
        for n in range(world):
            await made.beat(1, n)
        assert len(await made.nodes()) == world


def coordinator(world: int) -> Callable[[], object]:
    return lambda: asyncio.run(attempts(world))


def files(world: int, step: int = 20) -> list[str]:
    return [Shard(rank, world, 1, f"{rank * 1000 + step:032x}").name for rank in range(world)]


def placed(world: int, shared: bool) -> Callable[[], object]:
    names = files(world)
    copy = Copy(20, 1, "MANIFEST-0001.json", world, dict.fromkeys(names, 1), frozenset(names if shared else names[:1]))
    there: dict[str, Inventory] = {}
    for n in range(world // PER_NODE):
        before = (n - 1) % (world // PER_NODE)
        kept = {(20, names[m * PER_NODE + r]): 1 for m in (n, before) for r in range(PER_NODE)}
        there[node_of(n * PER_NODE)] = Inventory(kept, [copy] if n < 2 else [])
    del there[node_of(PER_NODE)]
    ranks = {rank: str(node_of(rank)) if rank // PER_NODE != 1 else "new" for rank in range(world)}

    def work() -> None:
        assert place(there, ranks) is not None

    return work


def checkpoint(world: int) -> Manifest:
    names = files(world)
    chunks = tuple(Chunk((rank,), (1,), name, 0, 4) for rank, name in enumerate(names))
    tensors = {"model/w": TensorEntry("float32", (world,), chunks)}
    entries = {name: FileEntry(4, "0" * 32) for name in names}
    return Manifest(20, world, 1, 0.0, "", entries, tensors, {SHARED: [], PEERS: []})


def written_and_read(world: int) -> Callable[[], object]:
    made = checkpoint(world)

    def work() -> None:
        assert Manifest.loads(made.dumps()) == made

    return work


def restored(world: int) -> Callable[[], object]:
    made = checkpoint(world)
    return lambda: memory_layout.needs(made, world // 2, world)


def hangs(world: int) -> Callable[[], object]:
    every = [["0", n, "all_reduce"] for n in range(20)]
    seen = dict.fromkeys(range(world), RankView("S", 7, "backward", 11.0, "", waits=True, collectives=every))
    seen[world // 2] = RankView("S", 7, "backward", 11.0, "train.py:3", collectives=every[:-1])

    def work() -> None:
        assert judge(seen).rank == world // 2

    return work


WORK: dict[str, Callable[[int], Callable[[], object]]] = {
    "coordinator": coordinator,
    "copies, sharded": lambda world: placed(world, shared=False),
    "copies, replicated": lambda world: placed(world, shared=True),
    "manifest": written_and_read,
    "restore": restored,
    "hang": hangs,
}


@pytest.mark.parametrize("name", WORK)
def test_work_in_proportion(name: str) -> None:
    """Four times the ranks: not much more than four times the operations."""
    few, many = (operations(WORK[name](world)) for world in (SMALL, SMALL * TIMES))
    assert many < few * TIMES * SLACK


def test_memory_stores_are_linked_in_proportion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each store learns its own ranks, and all of them in one pass."""
    linked: list[tuple[list[int], int]] = []
    store = SimpleNamespace(
        link=SimpleNamespace(remote=lambda me, buddy, ranks, world: linked.append((ranks, world))),
        closed=SimpleNamespace(remote=object),
    )
    monkeypatch.setattr(memory_checkpoints, "start_actor", lambda folder, node: store)

    def start(world: int) -> Callable[[], object]:
        found = MemoryCheckpoints(RunDir(tmp_path), private=True, note=print)
        found._private = False
        ranks = {rank: node_of(rank) for rank in range(world)}
        return lambda: found.job(1, ranks)

    few, many = (operations(start(world)) for world in (SMALL, SMALL * TIMES))
    assert many < few * TIMES * SLACK
    assert linked[:2] == [([*range(8)], SMALL), ([*range(8, 16)], SMALL)]
    assert len(linked) == (SMALL + SMALL * TIMES) // PER_NODE


def test_listing_in_proportion(tmp_path: Path) -> None:
    """The committed steps, and their summary."""

    def listed(world: int) -> Callable[[], object]:
        run = RunDir(tmp_path / str(world))
        begin_attempt(run, 1)
        run.storage.write(f"{step_folder(20)}/{manifest_name(1)}", checkpoint(world).dumps())
        for name in files(world):
            run.storage.write(f"{step_folder(20)}/{name}", b"1234")

        def work() -> None:
            assert [row["world_size"] for row in manifest.summary(run)] == [world]

        return work

    few, many = (operations(listed(world)) for world in (SMALL, SMALL * TIMES))
    assert many < few * TIMES * SLACK


def test_a_summary_reads_no_tensors(tmp_path: Path) -> None:
    """It costs as much for a hundred tensors as for one; a whole manifest does not."""

    def read(tensors: int) -> tuple[int, int]:
        run = RunDir(tmp_path / str(tensors))
        begin_attempt(run, 1)
        made = checkpoint(SMALL)
        made = replace(made, tensors={f"model/{n}": made.tensors["model/w"] for n in range(tensors)})
        run.storage.write(f"{step_folder(20)}/{manifest_name(1)}", made.dumps())
        return operations(lambda: manifest.summary(run)), operations(lambda: manifest.read(run, 20))

    (one, whole), (many, all_whole) = read(1), read(100)
    assert many < one * SLACK
    assert all_whole > whole * 10


def test_unreachable_nodes_are_asked_at_once() -> None:
    """Of many nodes that refuse or drop connections, those that listen are found, in one wait."""

    async def test() -> None:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            up = server.sockets[0].getsockname()
            down = ("127.0.0.1", 1)
            found = await nodes.listening(
                {**{f"up{n}": up for n in range(100)}, **{f"down{n}": down for n in range(100)}}
            )
        assert found == {f"up{n}" for n in range(100)}

    asyncio.run(asyncio.wait_for(test(), 60))
