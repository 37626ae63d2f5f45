"""Scheduling with `-n`: a file stays together; tests that must run alone come last."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling
from xdist.workermanage import WorkerController

ALONE = (
    "tests/worker/metrics/test_collective_counters.py",
    "tests/cluster/test_hosts.py::test_a_link_has_its_rate",
    "tests/cluster/test_hosts.py::test_nothing_is_left",
)
"""Files and tests that must run alone: they assert a time, a rate, or the state of the whole machine."""

_ALONE = " alone"


class Scheduling(LoadScopeScheduling):
    """A file stays in one process. The first process takes files from the front of the list, the others from its end, so that
    compute-bound tests run beside tests that wait for Ray. ALONE runs after everything else, in the last process."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False  # conftest decides the order
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file + _ALONE if nodeid.startswith(ALONE) else file

    def _assign_work_unit(self, node: WorkerController) -> None:
        if not self._rest_is_alone():
            together = [scope for scope in self.workqueue if not scope.endswith(_ALONE)]
            self.workqueue.move_to_end(together[0 if node is self.nodes[0] else -1], last=False)
        elif any(self._pending_of(work) for other, work in self.assigned_work.items() if other is not node):
            return
        super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        others = [other for other in self.nodes if other is not node]
        if self._rest_is_alone() and not (node.shutting_down or all(other.shutting_down for other in others)):
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
