"""Starts and ends the trials of a sweep, and sums up the hours that they use.

Runs in: the driver; its methods in Ray Tune's thread and in the main thread. Imports ray in functions only; never torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from raydist.cluster.session import Session
from raydist.cluster.sweep.micro_batch_memory import MicroBatches
from raydist.cluster.sweep.trial import EndRequest, Plan, TrialRun
from raydist.cluster.sweep.worker_group_pool import WorkerGroupPool
from raydist.errors import RaydistError
from raydist.report.sweep.standing import Live
from raydist.run.sweep_directory import SweepLog
from raydist.run.sweep_state import CellState


def _hours(run: TrialRun) -> tuple[float, float]:
    """Its GPU-hours and worker-hours so far."""
    workers = run.plan.workers
    return run.hours * workers * run.plan.request.gpus, run.hours * workers


class TrialRunner:
    """`plan(trial, changes)` prepares the trial of that id, with these values of fields in place of its own.

    `states`: of the trials, from earlier drivers. `post(trial, report)`: see `TrialRun`; `forget(trial)` drops the reports posted
    so far. `metric`: of the objective; `allowed`: failures of a trial that are retried. `over(trial, status)` is called when a
    trial has ended.
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
        over: Callable[[str, str], None] = lambda trial, status: None,
    ) -> None:
        self._session, self._pool, self._log, self._plan = session, pool, log, plan
        self._post, self._forget_reports = post, forget
        self._states, self._metric, self._allowed, self._over = states, metric, allowed, over
        self._fits = MicroBatches()
        self._gpu_hours = self._worker_hours = 0.0
        self._gone: str | None = None
        self._lock = threading.Lock()
        self._trials: dict[str, TrialRun] = {}
        """Trials that are running or ending."""
        self._closed: EndRequest | None = None
        self._changes = {
            name: {field: values[1] for copied in state.lineage for field, values in copied["changes"].items()}
            for name, state in states.items()
            if state.lineage
        }
        """Trial -> values that it has taken from other trials."""
        self._sources: dict[str, tuple[str, Mapping[str, list[Any]]]] = {}
        """Trial -> the trial whose checkpoint it copies at its next start, and the changed values."""
        self._adopted: SimpleQueue[Mapping[str, Any]] = SimpleQueue()

    def begin(self, trial: str) -> None:
        """Starts training the trial, as soon as it has workers. Does nothing if it is training."""
        with self._lock:
            before = self._trials.get(trial)
            if before is not None and before.end_request is None and before.status is None:
                return
            self._forget_reports(trial)  # of an earlier TrialRun of the trial
            state = self._states.get(trial, CellState())
            try:
                plan = self._plan(trial, self._changes.get(trial, {}))
            except RaydistError as error:  # a bad trial never ends the sweep
                self._log.event("failed", trial, cause=str(error), final=True)
                self._over(trial, "failed")
                self._post(trial, {"tokens": 0, "done": True})
                return
            source = self._sources.pop(trial, None)
            run = TrialRun(
                plan,
                self._session,
                self._pool,
                self._log,
                lambda report: self._post(trial, report),
                self._metric,
                failures=state.failures if before is None else before.failures,
                allowed=self._allowed,
                before=before,
                fits=self._fits,
                micro_batch=state.micro_batch,
                prepare=(lambda: self._adopt(plan, *source)) if source is not None else lambda: None,
                over=lambda status: self._over(trial, status),
            )
            self._trials[trial] = run
            if self._closed is not None:
                run.end(self._closed)

    def end(self, trial: str, end_request: EndRequest) -> None:
        """Ends that trial. Does nothing if it has ended."""
        with self._lock:
            run = self._trials.get(trial)
        if run is not None:
            run.end(end_request)

    def ready(self, trial: str) -> bool:
        """Whether the trial has a checkpoint that another one could continue from."""
        return bool(self._plan(trial, {}).request.run.committed())

    def exploit(self, trial: str, source: str, changes: Mapping[str, list[Any]]) -> None:
        """Ends the trial at once. At its next start it continues from the newest checkpoint of `source`, with other values.

        `changes`: field -> [before, after].
        """
        with self._lock:
            self._sources[trial] = source, changes
            self._changes[trial] = self._changes.get(trial, {}) | {
                field: after for field, (_, after) in changes.items()
            }
        self.end(trial, EndRequest("yielded", f"continues from {source}", at_once=True))

    def _adopt(self, plan: Plan, source: str, changes: Mapping[str, list[Any]]) -> None:
        """Copies the checkpoint of `source`. Called in a trial's thread, before it trains."""
        from raydist.cluster.sweep.pbt_exploit import adopt

        step = adopt(self._plan(source, {}).request.run, plan.request.run)
        data = {"source": source, "step": step, "tokens": plan.tokens(step), "changes": dict(changes)}
        self._adopted.put(self._log.event("exploited", plan.id, **data).data)

    def adopted(self) -> Iterator[Mapping[str, Any]]:
        """Data of the `exploited` events since the last call."""
        with suppress(Empty):
            while True:
                yield self._adopted.get_nowait()

    def close(self, because: str, at_once: bool = False) -> None:
        """No trial starts any more. Those that are running save a checkpoint and end, or end at once."""
        end_request = EndRequest("paused", because, at_once)
        with self._lock:
            self._closed = end_request
            trials = list(self._trials.values())
        self._pool.close()
        for run in trials:
            run.end(end_request)

    @property
    def closed(self) -> bool:
        """Whether no trial may start any more."""
        return self._closed is not None

    @property
    def gone(self) -> str | None:
        """Why the cluster is unusable, if a trial has found that; else None."""
        with self._lock:
            return next((run.gone for run in self._trials.values() if run.gone is not None), self._gone)

    def live(self) -> list[Live]:
        """The running trials, in the order of their start. Drops those that have ended."""
        with self._lock:
            self._forget()
            return [run.live for run in self._trials.values()]

    def used(self) -> tuple[float, float]:
        """GPU-hours and worker-hours of all trials so far."""
        with self._lock:
            self._forget()
            now = [_hours(run) for run in self._trials.values()]
            return self._gpu_hours + sum(gpu for gpu, _ in now), self._worker_hours + sum(all_ for _, all_ in now)

    def _forget(self) -> None:
        for name, run in list(self._trials.items()):
            if run.join(0):
                self._gone = self._gone or run.gone
                gpu, all_ = _hours(self._trials.pop(name))
                self._gpu_hours += gpu
                self._worker_hours += all_

    def join(self) -> None:
        """Waits until no trial is running."""
        with self._lock:
            trials = list(self._trials.values())
        for run in trials:
            run.join()
