"""One cell of a sweep while it trains: an ordinary run, tried again if it fails, whose progress Ray Tune is told.

Runs in: the driver, in a thread for each cell. Imports ray in functions only; never torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from raydist.cluster.run.request import Ending, Request
from raydist.cluster.run.supervisor import Supervisor
from raydist.cluster.run.worker_group_slot import WorkerGroupSlot
from raydist.cluster.session import Session
from raydist.cluster.sweep.micro_batch_memory import MicroBatches, shrunk
from raydist.errors import RaydistError, StorageError
from raydist.records import Event
from raydist.report.sweep.figures import measure
from raydist.run.directory import SPEC
from raydist.run.status import read_state
from raydist.run.sweep_directory import SweepLog
from raydist.spec import JobSpec, stored

_SIGNAL = 15
"""What a run that is ended for another reason than a signal is told; nobody sees it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A cell, ready to train. `total`: its steps."""

    id: str
    request: Request
    total: int

    @property
    def job(self) -> JobSpec:
        """The resolved spec."""
        return self.request.spec

    @property
    def workers(self) -> int:
        """How many it has."""
        return self.job.cluster.most

    def tokens(self, step: int) -> int:
        """Tokens trained on after `step` steps, as cells are compared: full global batches."""
        return step * self.job.train.global_batch * self.job.model.context


@dataclass(frozen=True, slots=True)
class EndRequest:
    """How a cell is to end before its last step, and why. `at_once`: without a checkpoint."""

    how: Literal["stopped", "paused", "yielded"]
    """stopped: for good; paused: goes on with the next start of the sweep; yielded: goes on later in this one."""
    because: str
    at_once: bool


@dataclass(slots=True)
class Live:
    """What the display shows of a cell."""

    id: str
    state: str = "waiting for workers"
    total: int = 0
    workers: int = 0
    snapshot: dict[str, Any] = field(default_factory=dict)


class SlotPool(Protocol):
    """Where slots come from: `raydist.cluster.sweep.worker_group_pool.WorkerGroupPool`."""

    def get(self, plan: Plan, given_up: Callable[[], bool]) -> WorkerGroupSlot | None:
        """One that nobody has, as soon as there is one; None if no cell is to start any more, or it is `given_up`."""
        ...

    def wake(self) -> None:
        """Somebody who waits for one has perhaps given up."""
        ...

    def put(self, slot: WorkerGroupSlot) -> None:
        """Back, for the next cell."""
        ...


class CellRun:
    """Starts at once. `post` is given its reports: tokens, step, loss, eval_loss, done, and objective where it is known; `last`: of
    its last step, after which it ends by itself.

    `metric`: what the objective is. `failures` of it so far, of which `allowed` are tried again. `fits`: what the sweep's cells
    know of micro-batches; `micro_batch`: what this one was last started with, if that was not its spec's.
    `before`: an earlier stretch of the same cell, which must be over; `prepare` is called then.
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
        before: CellRun | None = None,
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
        """As it is trained just now: with a micro-batch that fits."""
        self.live = Live(plan.id, total=plan.total, workers=plan.workers)
        self.status: str | None = None
        """How it ended: finished, stopped, paused, yielded or failed."""
        self._lock = threading.Lock()
        self.end_request: EndRequest | None = None
        self.gone: str | None = None
        """Why the cluster is of no use any more, if that is what ended it."""
        self._supervisor: Supervisor | None = None
        self._told: dict[str, Any] = {"tokens": 0, "step": 0, "loss": None, "eval_loss": None}
        self._had = 0.0
        """Seconds for which it had workers before."""
        self._since: float | None = None
        """From when on it has those of now."""
        self._thread = threading.Thread(target=self._run, name=f"raydist-cell-{plan.id}", daemon=True)
        self._thread.start()

    def end(self, end_request: EndRequest) -> None:
        """It is to end: after a checkpoint, or at once. The first wish says why, a later one may make it quicker."""
        with self._lock:
            self.end_request = self.end_request or end_request
            supervisor = self._supervisor
        if supervisor is not None:
            self._hurry(supervisor, end_request)
        self._slots.wake()

    @property
    def hours(self) -> float:
        """For how long it has had workers."""
        since = self._since
        return (self._had + (time.monotonic() - since if since is not None else 0.0)) / 3600.0

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits for its end; whether it has come."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- what the supervisor shows

    def update(self, snapshot: dict[str, Any]) -> None:
        """The run as it is now."""
        self.live.snapshot = snapshot
        record = snapshot["record"]
        if record is None or record["step"] <= self._told["step"] or self._metric == "eval_loss":
            return
        value = record["loss"] if self._metric == "loss" else snapshot["tokens_per_second"]
        self._report(record["step"], value, loss=record["loss"])

    def event(self, event: Event) -> None:
        """Something happened to the run."""
        if (micro_batch := shrunk([event])) is not None:
            self._fits.learn(self.plan.job, micro_batch)
        if event.kind == "eval":
            self._told["eval_loss"] = event.data["loss"]
            if self._metric == "eval_loss" and event.data["step"] > self._told["step"]:
                record = self.live.snapshot.get("record")
                self._report(event.data["step"], event.data["loss"], loss=record["loss"] if record else None)

    def note(self, text: str) -> None:
        """A word to the user; the sweep has its own."""

    def _report(self, step: int, value: float | None, **told: Any) -> None:
        self._told |= {"tokens": self.plan.tokens(step), "step": step, **told}
        if value is not None:
            self._told["objective"] = value
            # No report follows once `end` has returned: the next one is of the cell's next stretch.
            with self._lock:
                if self.end_request is None:
                    self._post({**self._told, "done": False, "last": step >= self.plan.total})

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
            except BaseException as error:  # a bad cell never ends the sweep; the next start of it tries this one again
                ending = Ending("stopped", self._told["step"], cause=f"{type(error).__name__}: {error}")
                self._log.event("failed", self.plan.id, cause=ending.cause, final=False)
            finally:
                self._since = None
                self._had += time.monotonic() - begun
                self._slots.put(slot)
        self._over(
            {"stopped": "failed", "paused": "finished"}.get(ending.status, ending.status), end_request=self.end_request
        )

    def _train(self, slot: WorkerGroupSlot) -> Ending | None:
        """None: its node is lost, and others have what is left of the cluster."""
        run, name = self.plan.request.run, self.plan.id
        if run.exists() and read_state(run)["status"] == "finished":
            self._note("finished")  # its driver was killed before it could write that down
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
                    changed = {"micro_batch": _micro_batch(self._request)} if self._request != before else {}
                    again = f"failure {self.failures} of {self._allowed} that are tried again"
                    self._log.event("retried", name, because=again, **changed)
                    continue
            elif ending.status == "interrupted":
                self._note("paused", because=ending.cause)
                self.live.state = "waiting for workers"
                return None
            return ending

    def _begin(self) -> None:
        """Notes that it has workers, with what it begins."""
        run = self.plan.request.run
        self._request = self._fits.fitted(self.plan.request, self._micro_batch)
        run.storage.write(SPEC, stored(self._request.spec).encode())
        begun = run.committed()
        told: dict[str, Any] = {"tokens": self.plan.tokens(begun[-1]) if begun else 0}
        if self._request != self.plan.request:
            told["micro_batch"] = self._micro_batch = _micro_batch(self._request)
            self._fits.learn(self.plan.job, self._micro_batch)
        gpus = self.plan.request.gpus * self.plan.workers
        self._log.event("started", self.plan.id, workers=self.plan.workers, gpus=gpus, **told)
        with suppress(StorageError):  # what storage refuses is kept, and tried again
            self._log.flush()  # now: a driver that is killed in the next moment has spent something

    def _attempt(self, slot: WorkerGroupSlot) -> tuple[Ending, bool]:
        """The run, once: until it is finished, interrupted, or raydist gives it up; and whether the cluster's head is gone."""
        with self._lock:
            end_request = self.end_request
            supervisor = self._supervisor = Supervisor(self._request, self._session, self, slot=slot)
        if end_request is not None:
            self._hurry(supervisor, end_request)
        try:
            return supervisor.run(signals=False), supervisor.headless
        except RaydistError as error:
            cause = ": ".join(filter(None, (error.message, error.hint)))
            return Ending("stopped", self._told["step"], cause=cause), supervisor.headless
        finally:
            with self._lock:
                self._supervisor = None

    @staticmethod
    def _hurry(supervisor: Supervisor, end_request: EndRequest) -> None:
        if end_request.how != "paused" and end_request.at_once:
            supervisor.cancel(_SIGNAL)  # its workers are for the next cell
            return
        for _ in range(1 + end_request.at_once):
            supervisor.stop(_SIGNAL)

    def _note(self, kind: str, **data: Any) -> None:
        """An event that ends a stretch, with what the run has come to."""
        figures: dict[str, Any] = {}
        with suppress(StorageError):
            figures = measure(self.plan.request.run)
        self._log.event(kind, self.plan.id, figures=figures, **data)
        with suppress(StorageError):  # what storage refuses is kept, and tried again
            self._log.flush()

    def _over(self, status: str, end_request: EndRequest | None) -> None:
        self.status = end_request.how if end_request is not None and status in ("interrupted", "paused") else status
        self.live.state = self.status
        self._on_over(self.status)
        if self.status != "yielded":
            told: Mapping[str, Any] = self._told if self.status != "failed" else {"tokens": self._told["tokens"]}
            self._post({**told, "done": True, "ended": self.status, "at": time.time()})


def _micro_batch(request: Request) -> int:
    return request.spec.train.micro_batch
