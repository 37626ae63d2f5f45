"""Takes the trials' reports from the driver to Ray Tune's actors, which wait for them.

Runs in: `ReportQueue` in one zero-CPU actor, owned by the driver and on its node; `Reports` in the driver. Imports ray in
functions only; never torch.

    trial's thread in the driver --Reports--> ReportQueue <--take-- Ray Tune's actor of the trial: one report is one iteration
    of Ray Tune
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

NAME = "raydist-reports"


class ReportQueue:
    """All methods are coroutines of one event loop. Ray may start them in any order, so a trial's reports are numbered from 0."""

    def __init__(self) -> None:
        self._queues: dict[str, _TrialQueue] = {}

    async def post(self, trial: str, number: int, report: Mapping[str, Any]) -> None:
        """Adds a report of a trial. Its last one has `done`."""
        self._queue_of(trial).put(number, report)

    async def take(self, trial: str) -> dict[str, Any]:
        """Waits for the next report of a trial. Of two calls that wait only the later one gets it: the other one's actor has ended,
        and Ray has started a new one.
        """
        report = await self._queue_of(trial).take()
        if report["done"]:
            del self._queues[trial]
        return report

    async def forget(self, trial: str, number: int) -> None:
        """Drops that trial's reports with lower numbers."""
        self._queue_of(trial).skip(number)

    def _queue_of(self, trial: str) -> _TrialQueue:
        return self._queues.setdefault(trial, _TrialQueue())


class _TrialQueue:
    """The reports of one trial: ready to be taken, or held until an earlier number arrives."""

    def __init__(self) -> None:
        self._ready: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._taking: asyncio.Task[dict[str, Any]] | None = None
        self._next = 0
        self._early: dict[int, dict[str, Any]] = {}

    async def take(self) -> dict[str, Any]:
        if self._taking is not None:
            self._taking.cancel()
        self._taking = asyncio.create_task(self._ready.get())
        return await self._taking

    def put(self, number: int, report: Mapping[str, Any]) -> None:
        if number >= self._next:  # else it is already dropped
            self._early[number] = dict(report)
            self._deliver()

    def skip(self, number: int) -> None:
        while not self._ready.empty():
            self._ready.get_nowait()
        self._next = number
        self._early = {n: report for n, report in self._early.items() if n >= number}
        self._deliver()

    def _deliver(self) -> None:
        while (report := self._early.pop(self._next, None)) is not None:
            self._next += 1
            self._ready.put_nowait(report)


class Reports:
    """The driver's handle of a report queue. Thread-safe."""

    def __init__(self, report_queue: Any) -> None:
        self._report_queue = report_queue
        self._lock = threading.Lock()
        self._sent: Counter[str] = Counter()

    def post(self, trial: str, report: Mapping[str, Any]) -> None:
        """Sends a report without waiting. One with `done` is the trial's last."""
        with self._lock:
            number = self._sent.pop(trial, 0)
            if not report["done"]:
                self._sent[trial] = number + 1
        self._report_queue.post.remote(trial, number, report)

    def forget(self, trial: str) -> None:
        """Drops the reports of that trial that were sent so far."""
        import ray

        with self._lock:
            number = self._sent[trial]
        ray.get(self._report_queue.forget.remote(trial, number))


def start_report_queue() -> Reports:
    """Starts the report queue as a zero-CPU actor on this process's node; it ends with this process. Returns at once."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
    options = {"name": NAME, "num_cpus": 0, "max_concurrency": 100_000, "scheduling_strategy": here}
    return Reports(ray.remote(ReportQueue).options(**options).remote())
