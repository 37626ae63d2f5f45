"""How many trials train at once: never so many that a trial waits for another's workers, on any cluster."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from raydist.cluster.run.fit import WorkerKind
from raydist.cluster.session import Session
from raydist.cluster.sweep import worker_group_pool as module
from raydist.cluster.sweep.capacity import Shape, at_once, places
from raydist.cluster.sweep.trial import Plan
from raydist.cluster.sweep.worker_group_pool import WorkerGroupPool
from raydist.errors import PreflightError

CPU, GPU = "CPU", "GPU"


@pytest.mark.parametrize(
    ("nodes", "shapes", "asked", "expected"),
    [
        ([{CPU: 8.0}], [Shape(2, 1, 0)], None, 4),
        ([{CPU: 8.0}], [Shape(2, 1, 0)], 3, 3),
        ([{CPU: 3.0}, {CPU: 3.0}], [Shape(2, 2, 0)], None, 1),
        ([{CPU: 64.0, GPU: 8.0}] * 2, [Shape(4, 2, 1)], None, 4),
        ([{CPU: 64.0, GPU: 8.0}] * 2, [Shape(4, 2, 1), Shape(8, 1, 1)], None, 2),
        ([{CPU: 1.0}], [Shape(2, 0.5, 0)], 5, 1),
        ([{CPU: 4.0}], [Shape(4, 1, 0), Shape(1, 4, 0)], None, 1),
    ],
)
def test_counts(nodes: list[dict[str, float]], shapes: list[Shape], asked: int | None, expected: int) -> None:
    """The number of workers of the largest size that fit decides; one trial at a time if none could have the maximum of
    everything."""
    assert at_once(nodes, shapes, asked) == expected


def test_a_cell_that_cannot_fit() -> None:
    """A trial that cannot fit is an error before the start, though the others would fit."""
    with pytest.raises(PreflightError, match="5 workers of 1 CPU, the cluster has 4 CPUs on 2 nodes: 4 would fit"):
        at_once([{CPU: 2.0}] * 2, [Shape(1, 1, 0), Shape(5, 1, 0)])


class Cluster:
    """Nodes on which Ray places workers in any way."""

    def __init__(self, nodes: list[dict[str, float]], chance: random.Random) -> None:
        self.free, self.chance = [dict(node) for node in nodes], chance

    def place(self, shape: Shape) -> list[int]:
        """The node of each worker. Raises if not all of them fit; on a real cluster they would wait."""
        found = []
        for _ in range(shape.workers):
            fit = [i for i, node in enumerate(self.free) if places([node], shape.each)]
            assert fit, f"{shape} waits for others: {self.free}"
            found.append(self.chance.choice(fit))
            for name, count in shape.each.items():
                self.free[found[-1]][name] -= count
        return found

    def give_back(self, shape: Shape, on: list[int]) -> None:
        """The trial's workers have ended."""
        for node in on:
            for name, count in shape.each.items():
                self.free[node][name] += count


class FakeWorkerGroupSlot:
    """A slot whose workers occupy resources of a cluster."""

    cluster: Cluster

    def __init__(self, session: Any, monitors: Any, may_start: Any) -> None:
        self.group: tuple[Shape, list[int]] | None = None

    @property
    def size(self) -> int:
        return self.group[0].workers if self.group is not None else 0

    @property
    def waiting(self) -> bool:
        return self.group is not None

    def fits(self, size: int, kind: WorkerKind) -> bool:
        each = Shape(1, kind.cpus, kind.gpus).each
        return self.group is not None and self.group[0].workers >= size and self.group[0].each == each

    def train(self, shape: Shape) -> None:
        """What a supervisor does with it: it uses the idle group if that fits, else it replaces it with a new one."""
        if self.fits(shape.workers, WorkerKind(shape.cpus, shape.gpus, {})):
            return
        if self.group is not None:
            self.cluster.give_back(*self.group)
        self.group = shape, self.cluster.place(shape)


class FakePlan:
    """A trial of a shape."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.workers = shape, shape.workers


@pytest.mark.parametrize("seed", range(200))
def test_no_cell_waits_for_another(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a random cluster, with trials of several shapes that end in random order and leave their workers idle: whenever a slot
    is free, the next trial's workers fit at once."""
    chance = random.Random(seed)
    nodes = [
        {CPU: float(chance.randint(1, 16)), GPU: float(chance.choice([0, 0, 1, 4, 8]))}
        for _ in range(chance.randint(1, 6))
    ]
    shapes = [
        Shape(chance.randint(1, 6), chance.choice([0.5, 1, 2, 4]), chance.choice([0, 0, 0.5, 1, 2]))
        for _ in range(chance.randint(1, 3))
    ]
    shapes = [shape for shape in shapes if places(nodes, shape.each) >= shape.workers]
    if not shapes:
        shapes = [Shape(1, 0.5, 0)]
    monkeypatch.setattr(module, "WorkerGroupSlot", FakeWorkerGroupSlot)
    monkeypatch.setattr(module, "kind", lambda plan: WorkerKind(plan.shape.cpus, plan.shape.gpus, {}))
    monkeypatch.setattr(FakeWorkerGroupSlot, "cluster", Cluster(nodes, chance), raising=False)
    count = at_once(nodes, shapes, chance.choice([None, 2, 100]))
    pool = WorkerGroupPool(cast(Session, None), count)
    busy: list[Any] = []
    for _ in range(60):
        if len(busy) == count or (busy and chance.random() < 0.3):
            pool.put(busy.pop(chance.randrange(len(busy))))
        plan = FakePlan(chance.choice(shapes))
        slot = cast(FakeWorkerGroupSlot, pool.get(cast(Plan, plan)))
        slot.train(plan.shape)
        busy.append(slot)
    assert count >= 1


def test_too_many_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """One trial more than `at_once` returns does not fit: the number is not smaller than necessary."""
    nodes, shape = [{CPU: 5.0}, {CPU: 3.0}], Shape(2, 2, 0)
    cluster = Cluster(nodes, random.Random(1))
    for _ in range(at_once(nodes, [shape])):
        cluster.place(shape)
    with pytest.raises(AssertionError, match="waits for others"):
        cluster.place(shape)
