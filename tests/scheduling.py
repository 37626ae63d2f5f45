"""Scheduling with `-n`: a file stays together; tests that must run alone come last; a third process takes those that wait."""

from __future__ import annotations

import os
from typing import Any

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling
from xdist.workermanage import WorkerController

ALONE = (
    "tests/worker/metrics/test_collective_counters.py::test_what_nothing_hides_is_exposed",
    "tests/worker/metrics/test_collective_counters.py::test_exposed_buckets_of_ddp",
    "tests/worker/metrics/test_collective_counters.py::test_seconds_are_kineto_s",
    "tests/cluster/test_hosts.py::test_a_link_has_its_rate",
    "tests/cluster/test_hosts.py::test_nothing_is_left",
)
"""Files and tests that must run alone: they assert a time, a rate, or the state of the whole machine."""

WAITING = (
    "tests/end_to_end/test_nodes.py",
    "tests/end_to_end/test_sweep.py",
    "tests/faults/test_nodes.py",
    "tests/end_to_end/test_hosts.py",
    "tests/faults/test_mesh.py",
    "tests/faults/test_survived.py",
    "tests/end_to_end/test_cluster.py",
    "tests/end_to_end/test_python_api.py",
    "tests/end_to_end/test_own_loop.py",
    "tests/end_to_end/test_walk.py",
    "tests/end_to_end/test_slurm.py",
    "tests/faults/test_private_ray.py",
    "tests/end_to_end/test_tutorials.py",
    "tests/end_to_end/test_exactness.py",
    "tests/end_to_end/test_storage.py",
    "tests/end_to_end/test_memory.py",
    "tests/end_to_end/test_ways_in.py",
    "tests/end_to_end/test_package.py",
    "tests/end_to_end/test_wire.py",
    "tests/end_to_end/test_trace.py",
    "tests/end_to_end/test_security.py",
    "tests/end_to_end/test_secrets.py",
)
"""Files whose tests wait most of their time: for Ray to notice that a node is lost, for timeouts, for drivers to start; the longest
first. In this order a third process, if there is one, runs them, and nothing else, so that two processes compute, and need no
driver of the command; they help when they have no other file left. Of two processes, one begins with these."""

_ALONE, _FOR_WAITING = " alone", 2
_NICENESS = 5


def give_way(config: pytest.Config) -> None:
    """In each of the first two processes, if there is a third one: its niceness rises. The tests that wait take little processor
    time, and have it at once, so that what they wait for is not late."""
    about = getattr(config, "workerinput", {"workerid": "gw0", "workercount": 1})
    if about["workercount"] > _FOR_WAITING and int(about["workerid"].removeprefix("gw")) < _FOR_WAITING:
        os.nice(_NICENESS)


class Scheduling(LoadScopeScheduling):
    """A file stays in one process. The first process takes files from the front of the list, the second from its end, so that
    compute-bound tests run beside tests that start Ray. A third one takes those of WAITING, which the others then take last. ALONE
    runs after everything else, in the last process.
    """

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False  # conftest decides the order
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file + _ALONE if nodeid.startswith(ALONE) else file

    def _assign_work_unit(self, node: WorkerController) -> None:
        if not self._rest_is_alone():
            if (scope := self._next(node)) is None:
                return
            self.workqueue.move_to_end(scope, last=False)
        elif any(self._pending_of(work) for other, work in self.assigned_work.items() if other is not node):
            return
        super()._assign_work_unit(node)

    def _next(self, node: WorkerController) -> str | None:
        """The scope that this process takes; None if the rest is for others."""
        waiting = [scope for scope in WAITING if scope in self.workqueue and len(self.nodes) > _FOR_WAITING]
        if node in self.nodes[_FOR_WAITING:]:
            return waiting[0] if waiting else None
        others = [scope for scope in self.workqueue if not scope.endswith(_ALONE) and scope not in waiting] or waiting
        return others[0 if node is self.nodes[0] else -1]

    def _reschedule(self, node: WorkerController) -> None:
        others = [other for other in self.nodes if other is not node]
        done = self._rest_is_alone() or self._next(node) is None
        if done and not (node.shutting_down or all(other.shutting_down for other in others)):
            node.shutdown()
        else:
            super()._reschedule(node)

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        """Also reschedules the other processes, which may be waiting for this one's work to finish."""
        super().mark_test_complete(node, item_index, duration)
        for other in self.nodes:
            if other is not node:
                self._reschedule(other)

    def _rest_is_alone(self) -> bool:
        return all(scope.endswith(_ALONE) for scope in self.workqueue)
