"""SlotPool go to those that wait, in turn, and are no more than the cluster has room for, also once it has lost nodes."""

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

KIND = WorkerKind(1.0, 0.0, {})


class FakeWorkerGroupSlot:
    """A slot of which only is known how many workers wait in it."""

    def __init__(self, session: Any, monitors: Any, may_start: Callable[[], bool]) -> None:
        self.may_start = may_start
        self.size = 0
        self.ended = threading.Event()

    @property
    def waiting(self) -> bool:
        return self.size > 0

    def fits(self, size: int, kind: WorkerKind) -> bool:
        return self.size >= size

    def foresee(self) -> None:
        """Of a monitor."""

    def start(self, size: int, kind: WorkerKind, **_: Any) -> int:
        return size

    def leave(self, group: int) -> None:
        self.size = group

    def end(self) -> None:
        self.size = 0
        self.ended.set()


def cell(workers: int = 1) -> Plan:
    """One with so many workers."""
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
        """A slot that has gone to a cell and has started its workers."""
        slot = cast(FakeWorkerGroupSlot, pool.get(cell(workers)))
        slot.leave(workers)
        return slot

    def waits(self, pool: WorkerGroupPool, given_up: Callable[[], bool] = lambda: False) -> Future[Any]:
        """A cell that is in the line."""
        length = len(pool._line)
        asked = self.threads.submit(pool.get, cell(), given_up)
        with pool._changed:
            assert asked.done() or pool._changed.wait_for(lambda: len(pool._line) > length or asked.done(), 10)
        return asked


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """One of three places."""
    monkeypatch.setattr(module, "WorkerGroupSlot", FakeWorkerGroupSlot)
    monkeypatch.setattr(module, "kind", lambda plan: KIND)
    with ThreadPoolExecutor() as threads:
        yield Cluster(threads)


def put(pool: WorkerGroupPool, slot: FakeWorkerGroupSlot) -> None:
    pool.put(cast(Any, slot))


def test_no_more_workers_than_need_be(cluster: Cluster) -> None:
    """Cells of one, two and three workers have been trained: the next of two has the two that wait, whoever came back last, and one
    of four takes the place of others."""
    pool = cluster.pool()
    slots = [cluster.out(pool, workers) for workers in (2, 3, 1)]
    for slot in slots:
        put(pool, slot)
    assert pool.get(cell(2)) is slots[0]
    assert pool.get(cell(4)) in slots[1:]


def test_the_first_one_that_waits_is_the_first(cluster: Cluster) -> None:
    """In the order in which they came, as slots come back."""
    pool = cluster.pool(1)
    slot = cluster.out(pool)
    asked = [cluster.waits(pool) for _ in range(4)]
    for one in asked:
        put(pool, slot)
        assert one.result(10) is slot
        assert not any(later.done() for later in asked[asked.index(one) + 1 :])


def test_a_node_is_lost_while_all_train(cluster: Cluster) -> None:
    """The cell that has lost its workers may have no new ones, and waits; it has the first slot that comes back, before one that
    came later; a third slot goes out again once there is room for it."""
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
    """Workers that wait for a cell make room for a cell that has lost its own."""
    pool = cluster.pool()
    lost, one, two = (cluster.out(pool) for _ in range(3))
    put(pool, one)
    put(pool, two)
    cluster.room = 2
    lost.may_start()
    assert one.ended.wait(10)
    again = cluster.waits(pool)
    put(pool, lost)
    assert again.result(10) is not None
    assert (two.waiting, two.ended.is_set()) == (True, False)


def test_it_looks_for_nodes_that_come_back(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself, as long as a cell waits."""
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    pool = cluster.pool(2)
    lost, _ = cluster.out(pool), cluster.out(pool)
    cluster.room = 1
    assert not lost.may_start()
    lost.end()
    put(pool, lost)
    again = cluster.waits(pool)
    assert all(cluster.looked.acquire(timeout=10) for _ in range(4))
    assert not again.done()
    cluster.room = 2
    assert again.result(10) is lost


def test_who_gives_up_has_none(cluster: Cluster) -> None:
    """A cell that the scheduler has stopped meanwhile leaves the line, and so do all once no cell is to begin any more."""
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
