"""One trial of a sweep while it trains: an ordinary run, retried after failures, that reports its progress to Ray Tune.

Runs in: the driver, in a thread for each trial. Imports ray in functions only; never torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from raydist.cluster.run.request import Ending, Request
from raydist.cluster.run.supervisor import Supervisor
from raydist.cluster.run.worker_group_slot import WorkerGroupSlot
from raydist.cluster.session import Session
from raydist.cluster.sweep.micro_batch_memory import MicroBatches, shrunk, size, size_field
from raydist.errors import RaydistError, StorageError
from raydist.records import Event
from raydist.report.sweep.figures import measure
from raydist.report.sweep.standing import Live
from raydist.run.directory import SPEC
from raydist.run.status import read_state
from raydist.run.sweep_directory import SweepLog
from raydist.spec import JobSpec, stored

_SIGNAL = 15
"""Signal number for runs that end for another reason than a signal; it is not shown."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A trial, ready to train. `total`: its steps."""

    id: str
    request: Request
    total: int

    @property
    def job(self) -> JobSpec:
        """The resolved job spec."""
        return self.request.spec

    @property
    def workers(self) -> int:
        """Number of its workers."""
        return self.job.cluster.most

    def tokens(self, step: int) -> int:
        """Tokens after `step` steps of full global batches; trials are compared by this count."""
        return step * self.job.train.global_batch * self.job.model.context


@dataclass(frozen=True, slots=True)
class EndRequest:
    """A request to end a trial before its last step. `at_once`: without a checkpoint."""

    how: Literal["stopped", "paused", "yielded"]
    """stopped: for good; paused: continues at the next start of the sweep; yielded: continues later in this one."""
    because: str
    at_once: bool


class SlotPool(Protocol):
    """`raydist.cluster.sweep.worker_group_pool.WorkerGroupPool`."""

    def get(self, plan: Plan, given_up: Callable[[], bool]) -> WorkerGroupSlot | None:
        """Waits for a free slot; None if no trial may start any more, or if `given_up()`."""

    def wake(self) -> None:
        """Makes those that wait in `get` check `given_up` again."""

    def put(self, slot: WorkerGroupSlot) -> None:
        """Returns a slot, for the next trial."""


class TrialRun:
    """The training of one trial; starts at once.

    `post` gets its reports: tokens, step, loss, eval_loss, done, and the objective if it is known; `last`: the report of the last
    step. `metric`: of the objective. `failures`: so far; `allowed`: how many are retried. `fits`: the micro-batches that fit, of
    the whole sweep; `micro_batch`: the size of its last micro-batches, if it differs from the spec's. `before`: an earlier part of
    the same trial; this one waits for its end, then calls `prepare`.
    """

    def __init__(
        self,
        plan: Plan,
        session: Session,
        slots: SlotPool,
        log: SweepLog,
        post: Callable[[dict[str, Any]], None],
        metric: str,
        *,
        failures: int = 0,
        allowed: int = 0,
        before: TrialRun | None = None,
        fits: MicroBatches | None = None,
        micro_batch: int | None = None,
        prepare: Callable[[], None] = lambda: None,
        over: Callable[[str], None] = lambda status: None,
    ) -> None:
        self.plan, self._session, self._slots, self._log = plan, session, slots, log
        self._post, self._metric = post, metric
        self.failures, self._allowed = failures, allowed
        self._before, self._prepare, self._on_over = before, prepare, over
        self._fits, self._micro_batch = fits or MicroBatches(), micro_batch
        self._request = plan.request
        """The request in use, with a micro-batch that fits."""
        self.live = Live(plan.id, total=plan.total, workers=plan.workers)
        self.status: str | None = None
        """How it ended: finished, stopped, paused, yielded or failed."""
        self._lock = threading.Lock()
        self.end_request: EndRequest | None = None
        self.gone: str | None = None
        """Why the cluster is unusable, if that ended the trial."""
        self._supervisor: Supervisor | None = None
        self._progress: dict[str, Any] = {"tokens": 0, "step": 0, "loss": None, "eval_loss": None}
        self._past_s = 0.0
        """Seconds with workers, without the current period."""
        self._since: float | None = None
        """When it got its current workers (time.monotonic)."""
        self._thread = threading.Thread(target=self._run, name=f"raydist-cell-{plan.id}", daemon=True)
        self._thread.start()

    def end(self, end_request: EndRequest) -> None:
        """Ends the trial: after a checkpoint, or at once. The first request has the reason; a later one may make it end faster."""
        with self._lock:
            self.end_request = self.end_request or end_request
            supervisor = self._supervisor
        if supervisor is not None:
            self._end_run(supervisor, end_request)
        self._slots.wake()

    @property
    def hours(self) -> float:
        """Hours with workers."""
        since = self._since
        return (self._past_s + (time.monotonic() - since if since is not None else 0.0)) / 3600.0

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits for its end; returns whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- called by the supervisor

    def update(self, snapshot: dict[str, Any]) -> None:
        """The current state of the run."""
        self.live.snapshot = snapshot
        record = snapshot["record"]
        if record is None or record["step"] <= self._progress["step"] or self._metric == "eval_loss":
            return
        value = record["loss"] if self._metric == "loss" else snapshot["tokens_per_second"]
        self._report(record["step"], value, loss=record["loss"])

    def event(self, event: Event) -> None:
        """One event of the run."""
        if (fits := shrunk([event])) is not None:
            self._fits.learn(self.plan.job, fits)
        if event.kind == "eval":
            self._progress["eval_loss"] = event.data["loss"]
            if self._metric == "eval_loss" and event.data["step"] > self._progress["step"]:
                record = self.live.snapshot.get("record")
                self._report(event.data["step"], event.data["loss"], loss=record["loss"] if record else None)

    def note(self, text: str) -> None:
        """Prints nothing: the sweep has its own lines."""

    def _report(self, step: int, value: float | None, **figures: Any) -> None:
        self._progress |= {"tokens": self.plan.tokens(step), "step": step, **figures}
        if value is not None:
            self._progress["objective"] = value
            # No report after `end` has returned: the next one belongs to the trial's next TrialRun.
            with self._lock:
                if self.end_request is None:
                    self._post({**self._progress, "done": False, "last": step >= self.plan.total})

    # --- in its thread

    def _run(self) -> None:
        if self._before is not None:
            self._before.join()
        ending, prepared = None, False
        while ending is None:
            slot = self._slots.get(self.plan, lambda: self.end_request is not None)
            if slot is None:
                if self.end_request is not None and self.end_request.how == "stopped":
                    self._note("stopped", because=self.end_request.because)
                self._over("paused", end_request=self.end_request)
                return
            self._since = begun = time.monotonic()
            try:
                if not prepared:
                    self._prepare()
                    prepared = True
                ending = self._train(slot)
            except BaseException as error:  # a bad trial never ends the sweep; the next start of the sweep retries it
                ending = Ending("stopped", self._progress["step"], cause=f"{type(error).__name__}: {error}")
                self._log.event("failed", self.plan.id, cause=ending.cause, final=False)
            finally:
                self._since = None
                self._past_s += time.monotonic() - begun
                self._slots.put(slot)
        self._over(
            {"stopped": "failed", "paused": "finished"}.get(ending.status, ending.status), end_request=self.end_request
        )

    def _train(self, slot: WorkerGroupSlot) -> Ending | None:
        """Trains with the workers of `slot`. None: a node was lost, and other trials use the rest of the cluster."""
        run, name = self.plan.request.run, self.plan.id
        if run.exists() and read_state(run)["status"] == "finished":
            self._note("finished")  # its driver was killed before it logged that
            return Ending("finished", self.plan.total)
        self.live.state = "running"
        while True:
            self._begin()
            ending, headless = self._attempt(slot)
            end_request = self.end_request
            if headless and ending.status == "stopped":
                end_request = self.end_request = self.end_request or EndRequest("paused", ending.cause, at_once=True)
                self.gone = ending.cause
            if ending.status == "finished":
                self._note("finished")
            elif end_request is not None:
                self._note("stopped" if end_request.how == "stopped" else "paused", because=end_request.because)
                return Ending("interrupted", ending.step)
            elif ending.status == "stopped":
                self.failures += 1
                final = self.failures > self._allowed
                self._note("failed", cause=ending.cause, final=final)
                if not final:
                    before, self._request = self._request, self._fits.fitted(self._request)
                    spec = self._request.spec
                    changed = {size_field(spec): size(spec)} if self._request != before else {}
                    again = f"failure {self.failures}; up to {self._allowed} are retried"
                    self._log.event("retried", name, because=again, **changed)
                    continue
            elif ending.status == "interrupted":
                self._note("paused", because=ending.cause)
                self.live.state = "waiting for workers"
                return None
            return ending

    def _begin(self) -> None:
        """Logs that the trial has workers, and the tokens and micro-batch that it starts with."""
        run = self.plan.request.run
        self._request = self._fits.fitted(self.plan.request, self._micro_batch)
        run.storage.write(SPEC, stored(self._request.spec).encode())
        begun = run.committed()
        start: dict[str, Any] = {"tokens": self.plan.tokens(begun[-1]) if begun else 0}
        if self._request != self.plan.request:
            start[size_field(self.plan.job)] = self._micro_batch = size(self._request.spec)
            self._fits.learn(self.plan.job, self._micro_batch)
        gpus = self.plan.request.gpus * self.plan.workers
        self._log.event("started", self.plan.id, workers=self.plan.workers, gpus=gpus, **start)
        with suppress(StorageError):  # the log keeps the events and retries
            self._log.flush()  # now, so that the hours count even if the driver is killed next

    def _attempt(self, slot: WorkerGroupSlot) -> tuple[Ending, bool]:
        """Runs the supervisor until the run finishes, is interrupted or fails. Also returns whether the cluster's head is lost."""
        supervisor = Supervisor.build(self._request, self._session, self, slot=slot)
        with self._lock:
            end_request, self._supervisor = self.end_request, supervisor
        if end_request is not None:
            self._end_run(supervisor, end_request)
        try:
            return supervisor.run(signals=False), supervisor.headless
        except RaydistError as error:
            cause = ": ".join(filter(None, (error.message, error.hint)))
            return Ending("stopped", self._progress["step"], cause=cause), supervisor.headless
        finally:
            with self._lock:
                self._supervisor = None

    @staticmethod
    def _end_run(supervisor: Supervisor, end_request: EndRequest) -> None:
        if end_request.how != "paused" and end_request.at_once:
            supervisor.cancel(_SIGNAL)  # keeps the workers, for the next trial
            return
        for _ in range(1 + end_request.at_once):
            supervisor.stop(_SIGNAL)

    def _note(self, kind: str, **data: Any) -> None:
        """Logs an event that ends the use of workers, with the run's metrics so far."""
        figures: dict[str, Any] = {}
        with suppress(StorageError):
            figures = measure(self.plan.request.run)
        self._log.event(kind, self.plan.id, figures=figures, **data)
        with suppress(StorageError):  # the log keeps the events and retries
            self._log.flush()

    def _over(self, status: str, end_request: EndRequest | None) -> None:
        self.status = end_request.how if end_request is not None and status in ("interrupted", "paused") else status
        self.live.state = self.status
        self._on_over(self.status)
        if self.status != "yielded":
            last: Mapping[str, Any] = (
                self._progress if self.status != "failed" else {"tokens": self._progress["tokens"]}
            )
            self._post({**last, "done": True, "ended": self.status, "at": time.time()})
