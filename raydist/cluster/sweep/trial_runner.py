"""The trial runner on which the cells of a sweep train: begins them, ends them, and knows what they have used.

Runs in: the driver; its methods in the thread of Ray Tune and in the main one. Imports ray in functions only; never torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from raydist.cluster.session import Session
from raydist.cluster.sweep.micro_batch_memory import MicroBatches
from raydist.cluster.sweep.trial import CellRun, EndRequest, Live, Plan
from raydist.cluster.sweep.worker_group_pool import WorkerGroupPool
from raydist.errors import RaydistError
from raydist.run.sweep_directory import SweepLog
from raydist.run.sweep_state import CellState


def _hours(run: CellRun) -> tuple[float, float]:
    """GPU-hours and worker-hours of it so far."""
    workers = run.plan.workers
    return run.hours * workers * run.plan.request.gpus, run.hours * workers


class TrialRunner:
    """`plan(cell, changes)` makes a cell ready to train, by its id, with these values of fields in place of its own.

    `states`: what became of cells before. `post(cell, report)`: see `CellRun`; `forget(cell)`: what it has posted so far is of no
    interest any more.

    `metric`: the objective's; `allowed`: failures of a cell that are tried again. `over(cell, status)`: a cell has ended so.
    """

    def __init__(
        self,
        session: Session,
        pool: WorkerGroupPool,
        log: SweepLog,
        plan: Callable[[str, Mapping[str, Any]], Plan],
        post: Callable[[str, dict[str, Any]], None],
        forget: Callable[[str], None],
        states: Mapping[str, CellState],
        *,
        metric: str,
        allowed: int,
        over: Callable[[str, str], None] = lambda cell, status: None,
    ) -> None:
        self._session, self._pool, self._log, self._plan = session, pool, log, plan
        self._post, self._forget_reports = post, forget
        self._states, self._metric, self._allowed, self._over = states, metric, allowed, over
        self._fits = MicroBatches()
        self._gpu_hours = self._worker_hours = 0.0
        self._gone: str | None = None
        self._lock = threading.Lock()
        self._cells: dict[str, CellRun] = {}
        """Those that train, or end just now."""
        self._closed: EndRequest | None = None
        self._changes = {
            name: {field: values[1] for told in state.lineage for field, values in told["changes"].items()}
            for name, state in states.items()
            if state.lineage
        }
        """Cell -> the values that it has by now from others."""
        self._sources: dict[str, tuple[str, Mapping[str, list[Any]]]] = {}
        """Cell -> whose checkpoint it goes on from when it begins the next time, and what changes."""
        self._adopted: SimpleQueue[Mapping[str, Any]] = SimpleQueue()

    def begin(self, cell: str) -> None:
        """The cell trains from now on, or as soon as it has workers. Nothing, if it does already."""
        with self._lock:
            before = self._cells.get(cell)
            if before is not None and before.end_request is None and before.status is None:
                return
            self._forget_reports(cell)  # of an earlier stretch, which may be over, and forgotten here
            state = self._states.get(cell, CellState())
            try:
                plan = self._plan(cell, self._changes.get(cell, {}))
            except RaydistError as error:  # a bad cell never ends the sweep
                self._log.event("failed", cell, cause=str(error), final=True)
                self._over(cell, "failed")
                self._post(cell, {"tokens": 0, "done": True})
                return
            source = self._sources.pop(cell, None)
            run = CellRun(
                plan,
                self._session,
                self._pool,
                self._log,
                lambda report: self._post(cell, report),
                self._metric,
                failures=state.failures if before is None else before.failures,
                allowed=self._allowed,
                before=before,
                fits=self._fits,
                micro_batch=state.micro_batch,
                prepare=(lambda: self._adopt(plan, *source)) if source is not None else lambda: None,
                over=lambda status: self._over(cell, status),
            )
            self._cells[cell] = run
            if self._closed is not None:
                run.end(self._closed)

    def end(self, cell: str, end_request: EndRequest) -> None:
        """That cell is to end; nothing, if it has."""
        with self._lock:
            run = self._cells.get(cell)
        if run is not None:
            run.end(end_request)

    def ready(self, cell: str) -> bool:
        """Whether the cell has a checkpoint that another could go on from."""
        return bool(self._plan(cell, {}).request.run.committed())

    def exploit(self, cell: str, source: str, changes: Mapping[str, list[Any]]) -> None:
        """The cell ends where it is, and when it begins again it goes on from the newest checkpoint of `source`, with other values:
        field -> [before, after].
        """
        with self._lock:
            self._sources[cell] = source, changes
            self._changes[cell] = self._changes.get(cell, {}) | {field: after for field, (_, after) in changes.items()}
        self.end(cell, EndRequest("yielded", f"goes on from {source}", at_once=True))

    def _adopt(self, plan: Plan, source: str, changes: Mapping[str, list[Any]]) -> None:
        """In a cell's thread, before it trains."""
        from raydist.cluster.sweep.pbt_exploit import adopt

        step = adopt(self._plan(source, {}).request.run, plan.request.run)
        told = {"source": source, "step": step, "tokens": plan.tokens(step), "changes": dict(changes)}
        self._adopted.put(self._log.event("exploited", plan.id, **told).data)

    def adopted(self) -> Iterator[Mapping[str, Any]]:
        """Data of the events `exploited` that nobody has asked for yet."""
        with suppress(Empty):
            while True:
                yield self._adopted.get_nowait()

    def close(self, because: str, at_once: bool = False) -> None:
        """No cell begins any more; those that train make a checkpoint and end, or end at once."""
        end_request = EndRequest("paused", because, at_once)
        with self._lock:
            self._closed = end_request
            cells = list(self._cells.values())
        self._pool.close()
        for run in cells:
            run.end(end_request)

    @property
    def closed(self) -> bool:
        """Whether no cell begins any more."""
        return self._closed is not None

    @property
    def gone(self) -> str | None:
        """Why the cluster is of no use any more, if a cell has found that."""
        with self._lock:
            return next((run.gone for run in self._cells.values() if run.gone is not None), self._gone)

    def live(self) -> list[Live]:
        """The cells that train, in the order they began. Forgets those that have ended."""
        with self._lock:
            self._forget()
            return [run.live for run in self._cells.values()]

    def used(self) -> tuple[float, float]:
        """GPU-hours and worker-hours of all cells so far."""
        with self._lock:
            self._forget()
            now = [_hours(run) for run in self._cells.values()]
            return self._gpu_hours + sum(gpu for gpu, _ in now), self._worker_hours + sum(all_ for _, all_ in now)

    def _forget(self) -> None:
        for name, run in list(self._cells.items()):
            if run.join(0):
                self._gone = self._gone or run.gone
                gpu, all_ = _hours(self._cells.pop(name))
                self._gpu_hours += gpu
                self._worker_hours += all_

    def join(self) -> None:
        """Returns once no cell trains any more."""
        with self._lock:
            cells = list(self._cells.values())
        for run in cells:
            run.join()
