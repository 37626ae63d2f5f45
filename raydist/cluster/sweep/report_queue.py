"""Where the cells leave their reports, and Ray Tune's actors wait for them.

Runs in: `ReportQueue` in one zero-CPU actor, owned by the driver and on its node; `Reports` in the driver. Imports ray in
functions only; never torch.

    cell's thread in the driver --Reports--> ReportQueue <--take-- Ray Tune's actor of the cell: one report is one iteration of Ray
    Tune's
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

NAME = "raydist-reports"


class ReportQueue:
    """Every method is a coroutine of one event loop. Ray begins them in any order, so a cell's reports are numbered, from 0."""

    def __init__(self) -> None:
        self._cells: dict[str, _TrialQueue] = {}

    async def post(self, cell: str, number: int, report: Mapping[str, Any]) -> None:
        """What a cell has to tell; its last report has `done`."""
        self._tray(cell).put(number, report)

    async def take(self, cell: str) -> dict[str, Any]:
        """The next report of a cell; waits for it."""
        report = await self._tray(cell).ready.get()
        if report["done"]:
            del self._cells[cell]
        return report

    async def forget(self, cell: str, number: int) -> None:
        """Nobody takes that cell's reports before this one any more."""
        self._tray(cell).skip(number)

    def _tray(self, cell: str) -> _TrialQueue:
        return self._cells.setdefault(cell, _TrialQueue())


class _TrialQueue:
    """The reports of one cell: `ready` to be taken, or waiting for one before them."""

    def __init__(self) -> None:
        self.ready: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._next = 0
        self._early: dict[int, dict[str, Any]] = {}

    def put(self, number: int, report: Mapping[str, Any]) -> None:
        if number >= self._next:  # else it is forgotten already
            self._early[number] = dict(report)
            self._deliver()

    def skip(self, number: int) -> None:
        while not self.ready.empty():
            self.ready.get_nowait()
        self._next = number
        self._early = {n: report for n, report in self._early.items() if n >= number}
        self._deliver()

    def _deliver(self) -> None:
        while (report := self._early.pop(self._next, None)) is not None:
            self._next += 1
            self.ready.put_nowait(report)


class Reports:
    """The driver's end of a report queue; from any thread."""

    def __init__(self, report_queue: Any) -> None:
        self._report_queue = report_queue
        self._lock = threading.Lock()
        self._sent: Counter[str] = Counter()

    def post(self, cell: str, report: Mapping[str, Any]) -> None:
        """Leaves a report, and does not wait. That with `done` is the cell's last one."""
        with self._lock:
            number = self._sent.pop(cell, 0)
            if not report["done"]:
                self._sent[cell] = number + 1
        self._report_queue.post.remote(cell, number, report)

    def forget(self, cell: str) -> None:
        """What was left so far is of no interest any more."""
        import ray

        with self._lock:
            number = self._sent[cell]
        ray.get(self._report_queue.forget.remote(cell, number))


def start_report_queue() -> Reports:
    """The sweep's report queue as an actor: zero CPUs, on this process's node, gone with this process. Returns at once."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
    options = {"name": NAME, "num_cpus": 0, "max_concurrency": 100_000, "scheduling_strategy": here}
    return Reports(ray.remote(ReportQueue).options(**options).remote())
