"""Waiting trials get slots in turn, and there are never more slots than the cluster has room for, also after it has lost
nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raydist.cluster.run.fit import WorkerKind
from raydist.cluster.session import Session
from raydist.cluster.sweep import worker_group_pool as module
from raydist.cluster.sweep.trial import Plan
from raydist.cluster.sweep.worker_group_pool import WorkerGroupPool

KIND = WorkerKind({"CPU": 1.0}, {})


class FakeWorkerGroupSlot:
    """A slot with only the number of its idle workers."""

    def __init__(self, session: Any, monitors: Any, may_start: Callable[[], bool]) -> None:
        self.may_start = may_start
        self.size = 0
        self.ended = threading.Event()

    @property
    def waiting(self) -> bool:
        return self.size > 0

    def fits(self, size: int, kind: WorkerKind) -> bool:
        return self.size >= size

    def prepare_next(self) -> None:
        """A real slot prepares a monitor."""

    def start(self, size: int, kind: WorkerKind, **_: Any) -> int:
        return size

    def leave(self, group: int) -> None:
        self.size = group

    def end(self) -> None:
        self.size = 0
        self.ended.set()


def cell(workers: int = 1) -> Plan:
    """A trial with this number of workers."""
    return cast(Plan, SimpleNamespace(id=f"cell-{workers}", workers=workers))


class Cluster:
    """Pools whose cluster has room for `room` slots, and threads that wait for one."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.threads, self.room = threads, 3
        self.looked = threading.Semaphore(0)

    def pool(self, size: int = 3) -> WorkerGroupPool:
        return WorkerGroupPool(cast(Session, None), size, room=self._look)

    def _look(self) -> int:
        self.looked.release()
        return self.room

    def out(self, pool: WorkerGroupPool, workers: int = 1) -> FakeWorkerGroupSlot:
        """A slot that a trial has, with its workers started."""
        slot = cast(FakeWorkerGroupSlot, pool.get(cell(workers)))
        slot.leave(workers)
        return slot

    def waits(self, pool: WorkerGroupPool, given_up: Callable[[], bool] = lambda: False) -> Future[Any]:
        """A trial that waits in the queue."""
        length = len(pool._waiting)
        asked = self.threads.submit(pool.get, cell(), given_up)
        with pool._changed:
            assert asked.done() or pool._changed.wait_for(lambda: len(pool._waiting) > length or asked.done(), 240)
        return asked


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster with room for three slots."""
    monkeypatch.setattr(module, "WorkerGroupSlot", FakeWorkerGroupSlot)
    monkeypatch.setattr(module, "kind", lambda plan: KIND)
    with ThreadPoolExecutor() as threads:
        yield Cluster(threads)


def put(pool: WorkerGroupPool, slot: FakeWorkerGroupSlot) -> None:
    pool.put(cast(Any, slot))


def test_no_more_workers_than_need_be(cluster: Cluster) -> None:
    """Trials of one, two and three workers have ended: the next trial of two gets the slot with two idle workers, whichever was
    returned last; a trial of four replaces the workers of another slot."""
    pool = cluster.pool()
    slots = [cluster.out(pool, workers) for workers in (2, 3, 1)]
    for slot in slots:
        put(pool, slot)
    assert pool.get(cell(2)) is slots[0]
    assert pool.get(cell(4)) in slots[1:]


def test_the_first_one_that_waits_is_the_first(cluster: Cluster) -> None:
    """Trials get returned slots in the order in which they asked."""
    pool = cluster.pool(1)
    slot = cluster.out(pool)
    asked = [cluster.waits(pool) for _ in range(4)]
    for one in asked:
        put(pool, slot)
        assert one.result(10) is slot
        assert not any(later.done() for later in asked[asked.index(one) + 1 :])


def test_a_node_is_lost_while_all_train(cluster: Cluster) -> None:
    """A trial that has lost its workers may start no new ones, and waits. It gets the first returned slot, before a trial that
    came later. A third slot is given out once there is room for it."""
    pool = cluster.pool()
    lost, one, two = (cluster.out(pool) for _ in range(3))
    assert lost.may_start()
    cluster.room = 2
    assert not lost.may_start()
    lost.end()
    put(pool, lost)
    first, second = cluster.waits(pool), cluster.waits(pool)
    put(pool, one)
    assert first.result(10) is one
    assert one.waiting, "it has kept its workers"
    assert not second.done()
    put(pool, two)
    assert second.result(10) is two
    third = cluster.waits(pool)
    cluster.room = 3
    pool._look()
    assert third.result(10) is lost


def test_a_node_is_lost_while_workers_wait(cluster: Cluster) -> None:
    """Idle workers are ended to make room for a trial that has lost its own."""
    pool = cluster.pool()
    lost, one, two = (cluster.out(pool) for _ in range(3))
    put(pool, one)
    put(pool, two)
    cluster.room = 2
    lost.may_start()
    assert one.ended.wait(240)
    again = cluster.waits(pool)
    put(pool, lost)
    assert again.result(10) is not None
    assert (two.waiting, two.ended.is_set()) == (True, False)


def test_it_looks_for_nodes_that_come_back(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool checks on its own, as long as a trial waits."""
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    pool = cluster.pool(2)
    lost, _ = cluster.out(pool), cluster.out(pool)
    cluster.room = 1
    assert not lost.may_start()
    lost.end()
    put(pool, lost)
    again = cluster.waits(pool)
    assert all(cluster.looked.acquire(timeout=240) for _ in range(4))
    assert not again.done()
    cluster.room = 2
    assert again.result(10) is lost


def test_who_gives_up_has_none(cluster: Cluster) -> None:
    """A trial that the scheduler has stopped in the meantime leaves the queue; when the pool closes, all do."""
    pool = cluster.pool(1)
    cluster.out(pool)
    over = threading.Event()
    gives_up, other = cluster.waits(pool, over.is_set), cluster.waits(pool)
    over.set()
    pool.wake()
    assert gives_up.result(10) is None
    assert not other.done()
    pool.close()
    assert other.result(10) is None
