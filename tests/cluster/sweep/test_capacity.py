"""How many trials train at once: never so many that a trial waits for another's workers, on any cluster."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from raydist.cluster.nodes import places, usable
from raydist.cluster.run.fit import WorkerKind
from raydist.cluster.session import Session
from raydist.cluster.sweep import worker_group_pool as module
from raydist.cluster.sweep.capacity import Shape, at_once
from raydist.cluster.sweep.trial import Plan
from raydist.cluster.sweep.worker_group_pool import WorkerGroupPool
from raydist.errors import PreflightError
from raydist.spec.resources import ResourcesSpec

CPU, GPU, NVME = "CPU", "GPU", "fast_nvme"
POOL = {name: ResourcesSpec(labels={"pool": name}) for name in "ab"}


def listed(nodes: list[dict[str, float]], pools: str = "") -> list[dict[str, Any]]:
    """Nodes with these resources, as Ray lists them: each in its pool."""
    labels = [{"pool": pool} for pool in pools] or [{}] * len(nodes)
    return [
        {"Resources": node, "Labels": each, "NodeManagerAddress": f"10.0.0.{number}"}
        for number, (node, each) in enumerate(zip(nodes, labels, strict=True))
    ]


@pytest.mark.parametrize(
    ("nodes", "shapes", "asked", "expected"),
    [
        ([{CPU: 8.0}], [Shape(2, {CPU: 1})], None, 4),
        ([{CPU: 8.0}], [Shape(2, {CPU: 1})], 3, 3),
        ([{CPU: 3.0}, {CPU: 3.0}], [Shape(2, {CPU: 2})], None, 1),
        ([{CPU: 64.0, GPU: 8.0}] * 2, [Shape(4, {CPU: 2, GPU: 1})], None, 4),
        ([{CPU: 64.0, GPU: 8.0}] * 2, [Shape(4, {CPU: 2, GPU: 1}), Shape(8, {CPU: 1, GPU: 1})], None, 2),
        ([{CPU: 1.0}], [Shape(2, {CPU: 0.5})], 5, 1),
        ([{CPU: 4.0}], [Shape(4, {CPU: 1}), Shape(1, {CPU: 4})], None, 1),
    ],
)
def test_counts(nodes: list[dict[str, float]], shapes: list[Shape], asked: int | None, expected: int) -> None:
    """The number of workers of the largest size that fit decides; one trial at a time if none could have the maximum of
    everything."""
    assert at_once(listed(nodes), shapes, asked) == expected


def test_a_cell_that_cannot_fit() -> None:
    """A trial that cannot fit is an error before the start, though the others would fit."""
    with pytest.raises(PreflightError, match="5 workers of 1 CPU, the cluster has 4 CPUs on 2 nodes: 4 would fit"):
        at_once(listed([{CPU: 2.0}] * 2), [Shape(1, {CPU: 1}), Shape(5, {CPU: 1})])


def test_nodes_that_only_some_cells_may_use() -> None:
    """The nodes without a cell's label or custom resource do not count for it; the others' workers may be on its nodes."""
    nodes = listed([{CPU: 8.0, NVME: 2.0}, {CPU: 8.0}, {CPU: 8.0}], "abb")
    a, b, nvme = Shape(2, {CPU: 2}, POOL["a"]), Shape(2, {CPU: 2}, POOL["b"]), Shape(1, {CPU: 1, NVME: 1})
    assert [at_once(nodes, shapes) for shapes in ([a], [b], [nvme], [a, b])] == [2, 4, 2, 2]
    with pytest.raises(PreflightError, match="6 workers of 2 CPUs, the cluster has 8 CPUs on 1 node: 4 would fit"):
        at_once(nodes, [Shape(6, {CPU: 2}, POOL["a"])])
    with pytest.raises(
        PreflightError, match="3 workers of 1 CPU and 1 fast_nvme, the cluster has 24 CPUs and 2 fast_nvme"
    ):
        at_once(nodes, [Shape(3, {CPU: 1, NVME: 1})])


class Cluster:
    """Nodes on which Ray places workers in any way."""

    def __init__(self, nodes: list[dict[str, Any]], chance: random.Random) -> None:
        self.nodes, self.chance = nodes, chance
        self.free = [dict(node["Resources"]) for node in nodes]

    def place(self, shape: Shape) -> list[int]:
        """The node of each worker. Raises if not all of them fit; on a real cluster they would wait."""
        found = []
        for _ in range(shape.workers):
            fit = [
                i
                for i, node in enumerate(self.free)
                if places([node], shape.each) and usable(self.nodes[i], shape.asked)
            ]
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
        has = self.group and (self.group[0].each, self.group[0].asked)
        return self.group is not None and self.group[0].workers >= size and has == (kind.each, kind.asked)

    def train(self, shape: Shape) -> None:
        """What a supervisor does with it: it uses the idle group if that fits, else it replaces it with a new one."""
        if self.fits(shape.workers, WorkerKind(shape.each, {}, shape.asked)):
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
    count = chance.randint(1, 6)
    nodes = listed(
        [
            {
                CPU: float(chance.randint(1, 16)),
                GPU: float(chance.choice([0, 0, 1, 4, 8])),
                NVME: float(chance.randint(0, 3)),
            }
            for _ in range(count)
        ],
        "".join(chance.choices("ab", k=count)),
    )
    shapes = [
        Shape(
            chance.randint(1, 6),
            {
                name: amount
                for name, amounts in {CPU: [0.5, 1, 2, 4], GPU: [0, 0, 0.5, 1, 2], NVME: [0, 0, 0, 1]}.items()
                if (amount := chance.choice(amounts))
            },
            chance.choice([ResourcesSpec(), ResourcesSpec(), *POOL.values()]),
        )
        for _ in range(chance.randint(1, 3))
    ]
    shapes = [shape for shape in shapes if shape.places(nodes) >= shape.workers]
    if not shapes:
        shapes = [Shape(1, {CPU: 0.5})]
    monkeypatch.setattr(module, "WorkerGroupSlot", FakeWorkerGroupSlot)
    monkeypatch.setattr(module, "kind", lambda plan: WorkerKind(plan.shape.each, {}, plan.shape.asked))
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
    nodes, shape = listed([{CPU: 5.0}, {CPU: 3.0}]), Shape(2, {CPU: 2})
    cluster = Cluster(nodes, random.Random(1))
    for _ in range(at_once(nodes, [shape])):
        cluster.place(shape)
    with pytest.raises(AssertionError, match="waits for others"):
        cluster.place(shape)
