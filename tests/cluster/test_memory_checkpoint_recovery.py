"""From which snapshot a run resumes, and which node fetches which files: as a table, and for a cluster of 10,000 ranks."""

from __future__ import annotations

from raydist.checkpoint.memory_layout import Shard
from raydist.cluster.run.memory_checkpoint_recovery import Copy, Inventory, place, presumed


def name(rank: int, world: int, step: int) -> str:
    return Shard(rank, world, 1, f"{rank * 1000 + step:032x}").name


def copy(step: int, world: int, shared: tuple[int, ...] = (0,), attempt: int = 1) -> Copy:
    files = {name(r, world, step): 100 + r for r in range(world)}
    common = frozenset(name(r, world, step) for r in shared)
    return Copy(step, attempt, f"MANIFEST-{attempt:04d}.json", world, files, common)


def cluster(world: int, per_node: int, steps: tuple[int, ...], shared: tuple[int, ...] = (0,)) -> dict[str, Inventory]:
    """Nodes n0, n1, ... whose ranks wrote these steps; each also keeps the copies of the node before it."""
    count = world // per_node
    nodes = {}
    for n in range(count):
        own, buddy = (
            {(s, name(r, world, s)): 100 + r for s in steps for r in range(m * per_node, (m + 1) * per_node)}
            for m in (n, (n - 1) % count)
        )
        copies = [copy(s, world, shared) for s in steps] if n in (0, 1 % count) else []
        nodes[f"n{n}"] = Inventory(own, copies, buddy)
    return nodes


def ranks(world: int, per_node: int) -> dict[int, str]:
    return {r: f"n{r // per_node}" for r in range(world)}


def test_nothing_is_lost() -> None:
    """The newest step is used; each node has the files that only its ranks need, and none fetches what all ranks read: the ranks
    send that to each other."""
    found = place(cluster(8, 2, (10, 20)), ranks(8, 2), after=15)
    assert found is not None
    assert found.copy.step == 20
    assert found.fetches == {}


def test_a_lost_node_is_replaced() -> None:
    """Its ranks start on a new node, which fetches their shards from the buddy; the other ranks stay where they are."""
    nodes = cluster(8, 2, (10, 20))
    del nodes["n1"]
    found = place(nodes, {**ranks(8, 2), 2: "new", 3: "new"})
    assert found is not None
    assert found.copy.step == 20
    assert found.manifest_from == "n0"
    assert {(f.name, f.source) for f in found.fetches["new"]} == {(name(2, 8, 20), "n2"), (name(3, 8, 20), "n2")}


def test_a_lost_node_and_fewer_ranks() -> None:
    """Another number of ranks reads all files, which are on the other nodes."""
    nodes = cluster(8, 2, (20,))
    del nodes["n0"]
    left = {r: f"n{1 + r // 2}" for r in range(6)}
    found = place(nodes, left)
    assert found is not None
    assert found.manifest_from == "n1"
    assert found.fetches == {}


def test_what_only_a_node_without_ranks_has_is_fetched_once() -> None:
    """Two neighbours leave, and still answer: the files that are on no other node go to one node with ranks each."""
    nodes = cluster(8, 2, (20,))
    found = place(nodes, {0: "n0", 1: "n0", 2: "n3", 3: "n3"})
    assert found is not None
    assert {*found.fetches} == {"n3"}
    # n3 keeps the files of n2 as its buddy.
    assert {(f.name, f.source) for f in found.fetches["n3"]} == {(name(2, 8, 20), "n1"), (name(3, 8, 20), "n2")}


def test_nodes_that_are_not_asked() -> None:
    """What they have of a copy follows from it. If that does not suffice, no older copy is chosen: they may have more."""
    nodes = cluster(8, 2, (10, 20))
    asked = {n: nodes[n] for n in ("n0", "n1")}
    others = {r: n for r, n in ranks(8, 2).items() if n not in asked}
    found = place(asked, ranks(8, 2), others=lambda copy: presumed(copy, others, peers=False))
    assert found == place(nodes, ranks(8, 2))
    del others[5]
    assert place(asked, ranks(8, 2), others=lambda copy: presumed(copy, others, peers=False)) is None


def test_two_neighbours_lost_means_an_older_source() -> None:
    """A shard is lost: the step before is used if it is complete, else none; none either if storage has that step too."""
    nodes = cluster(8, 2, (10, 20))
    del nodes["n1"].files[20, name(2, 8, 20)], nodes["n2"].buddy[20, name(2, 8, 20)]  # type: ignore[attr-defined]
    found = place(nodes, ranks(8, 2))
    assert found is not None
    assert found.copy.step == 10
    assert place(nodes, ranks(8, 2), after=10) is None
    del nodes["n1"], nodes["n2"]
    assert place(nodes, ranks(8, 2)) is None


def test_a_file_of_another_size_does_not_count() -> None:
    """It is being overwritten, or is truncated: the buddy's file is used."""
    nodes = cluster(4, 2, (20,))
    nodes["n1"].files[20, name(2, 4, 20)] = 5  # type: ignore[index]
    found = place(nodes, ranks(4, 2))
    assert found is not None
    assert next((f.name, f.source) for f in found.fetches["n1"]) == (name(2, 4, 20), "n0")


def test_copies_of_a_dead_line_do_not_count() -> None:
    """Only copies for which `counts` is true, those of the run's lineage, are used."""
    nodes = cluster(4, 2, (10, 20))
    found = place(nodes, ranks(4, 2), counts=lambda copy: copy.step < 20)
    assert found is not None
    assert found.copy.step == 10


def test_peers_hold_each_others_shards() -> None:
    """Ranks that hold the same boxes saved one of them each, so every rank of the group needs all files of the group."""
    one = Copy(20, 1, "MANIFEST-0001.json", 4, {name(r, 4, 20): 1 for r in (0, 1)}, frozenset(), [[0, 2], [1, 3]])
    files = {(20, n): 1 for n in one.files}
    found = place({"n0": Inventory(files, [one]), "n1": Inventory()}, ranks(4, 2))
    assert found is not None
    assert [(f.name, f.source) for f in found.fetches["n1"]] == [(name(0, 4, 20), "n0"), (name(1, 4, 20), "n0")]
    # They have them after that.
    again = {n: presumed(one, {r: m for r, m in ranks(4, 2).items() if m == n}, peers=True)[n] for n in ("n0", "n1")}
    found = place({**again, "n0": Inventory(files, [one])}, ranks(4, 2))
    assert found is not None
    assert found.fetches == {}


def test_ten_thousand_ranks() -> None:
    """With a lost node: for sharded state, and for state that every rank reads in full. benchmarks/simulated.py measures the
    time."""
    for shared in ((0,), tuple(range(10_000))):
        nodes = cluster(10_000, 8, (10, 20), shared)
        del nodes["n77"]
        found = place(nodes, {r: node if node != "n77" else "new" for r, node in ranks(10_000, 8).items()})
        assert found is not None
        assert found.copy.step == 20
        assert {*found.fetches} == ({"new"} if len(shared) == 1 else set())
