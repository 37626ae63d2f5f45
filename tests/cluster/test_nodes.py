"""Where there is room, and with how many workers a run continues: tables. tests/end_to_end/test_nodes.py tests the calls to
Ray."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from raydist.cluster import nodes
from raydist.cluster.nodes import Node, assigned, room
from raydist.cluster.run.recovery import SETTLE_S, Proceed, Stop, Wait, resize
from raydist.spec.parallel import ParallelSpec
from raydist.spec.running import RecoverySpec

NODES = [
    Node("a", {"CPU": 8.0, "GPU": 4.0}),
    Node("b", {"CPU": 3.0, "GPU": 4.0}),
    Node("c", {}),
    Node("leaving", {"CPU": 64.0, "GPU": 8.0}, draining=True),
]


@pytest.mark.parametrize(
    ("each", "ours", "avoid", "expected"),
    [
        ({"CPU": 1.0, "GPU": 1.0}, {}, [], 4 + 3),
        ({"CPU": 2.0, "GPU": 0.0}, {}, [], 4 + 1),
        ({"CPU": 1.0, "GPU": 1.0}, {"c": 2, "leaving": 5}, [], 4 + 3 + 2),
        ({"CPU": 1.0, "GPU": 1.0}, {"a": 1, "gone": 3}, ["a"], 3),
        ({"CPU": 0.1}, {}, ["a", "c"], 30),
    ],
)
def test_room(each: dict[str, float], ours: dict[str, int], avoid: list[str], expected: int) -> None:
    """Whole workers only; resources that our workers hold count as free; nodes that leave, are avoided or are gone do not
    count."""
    assert room(NODES, each, ours, avoid) == expected


def test_room_for_ranks_that_must_be_on_one_node() -> None:
    """Only multiples count on each node, with the workers that are already there."""
    each = {"CPU": 1.0, "GPU": 1.0}
    assert room(NODES, each, {}, together=2) == 4 + 2
    assert room(NODES, each, {"b": 1, "c": 3}, together=2) == 4 + 4 + 2
    assert room(NODES, each, {}, together=4) == 4


def test_nodes_of_ranks_that_must_be_on_one() -> None:
    """The fewest nodes, each with whole tensor groups only, for as many workers as `room` counts; none if not all have room."""
    each = {"CPU": 1.0, "GPU": 1.0}
    three = [Node("x", {"CPU": 3.0, "GPU": 4.0}), Node("y", {"CPU": 3.0, "GPU": 4.0})]
    assert assigned(three, each, {}, [], 2, 4) == ["x", "x", "y", "y"]
    assert assigned(three, each, {}, ["x"], 2, 4) == []
    assert assigned(NODES, each, {"b": 1}, [], 2, 6) == ["a"] * 4 + ["b"] * 2
    assert assigned(NODES, each, {"b": 3}, [], 2, 2) == ["b"] * 2
    assert assigned(NODES, each, {"b": 1}, [], 2, 10) == []
    assert len(assigned(NODES, each, {}, [], 2, room(NODES, each, {}, together=2))) == 6


@pytest.mark.parametrize(
    ("mesh", "unit"),
    [
        ({}, 1),
        ({"tensor": 2}, 2),
        ({"pipeline": 2, "chunks": 2}, 2),
        ({"context": 2, "pipeline": 2}, 4),
        ({"expert": 4}, 4),
        ({"tensor": 2, "expert": 4}, 4),
        ({"tensor": 2, "expert": 2}, 2),
        ({"pipeline": 2, "expert": 4}, 8),
    ],
)
def test_a_run_has_whole_replicas_and_sets_of_experts(mesh: dict[str, int], unit: int) -> None:
    """Of any number of workers, as many as make these."""
    assert [ParallelSpec(**mesh).whole(n) for n in range(20)] == [n - n % unit for n in range(20)]


ALL = "the number of workers is fixed"


@pytest.mark.parametrize(
    ("least", "most", "living", "space", "waited", "policy", "expected"),
    [
        # all are there, also spares
        (2, 2, 3, 3, 0.0, {}, Proceed(2, False, "all workers are there")),
        (1, 2, 2, 2, 0.0, {}, Proceed(2, False, "all workers are there")),
        # a fixed size: Ray waits for room
        (2, 2, 1, 1, 0.0, {}, Proceed(2, True, ALL)),
        (2, 2, 0, 0, 0.0, {}, Proceed(2, True, ALL)),
        # there is room for all on other nodes
        (1, 4, 2, 4, 0.0, {}, Proceed(4, True, "there is room for 4")),
        # fewer: at once, or after waiting for a spare
        (1, 4, 3, 3, 0.0, {}, Proceed(3, False, "3 of 4 workers are left, and 1 are enough")),
        (1, 4, 3, 3, 9.0, {"wait_for_spare_s": 10}, Wait("3 of 1 workers")),
        (1, 4, 3, 3, 10.0, {"wait_for_spare_s": 10}, Proceed(3, False, "3 of 4 workers are left, and 1 are enough")),
        # no worker is left: it takes a while until their resources are free
        (2, 4, 0, 2, 0.0, {}, Wait("2 of 2 workers")),
        (2, 4, 0, 2, SETTLE_S, {}, Proceed(2, True, "there is room for 2 of 4 workers, and 2 are enough")),
        # too few
        (3, 4, 2, 2, 599.0, {}, Wait("2 of 3 workers")),
        (3, 4, 2, 2, 60.0, {"wait_for_nodes": 60}, Stop),
    ],
)
def test_resize(
    least: int, most: int, living: int, space: int, waited: float, policy: dict[str, float], expected: object
) -> None:
    """Each branch of `resize`."""
    found = resize(least, most, living, space, waited, RecoverySpec(**policy))  # type: ignore[arg-type]
    if expected is Stop:
        assert isinstance(found, Stop)
        assert "room for 2 workers, and the run needs 3" in found.cause
        assert "recovery.wait_for_nodes" in found.because
    else:
        assert found == expected


def test_all_that_do_not_answer_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One packet that is lost costs no node. After a loss, which is a second sign, they are asked once."""
    asked: list[set[str]] = []

    async def listening(addresses: Mapping[str, tuple[str, int]]) -> set[str]:
        asked.append({*addresses})
        return {"a"} if len(asked) % 2 else {"b"}

    facts = [
        {"NodeID": n, "Alive": n != "dead", "NodeManagerAddress": n, "NodeManagerPort": 1}
        for n in ("a", "b", "c", "dead")
    ]
    monkeypatch.setattr(nodes, "listed", lambda: facts)
    monkeypatch.setattr(nodes, "listening", listening)
    assert nodes.unreachable() == {"c"}
    assert asked == [{"a", "b", "c"}, {"b", "c"}]
    assert nodes.unreachable(["b", "dead"]) == {"b", "dead"}
    assert asked[2:] == [{"b"}]
