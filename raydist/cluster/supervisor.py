"""One run, from its first attempt to its last: starts attempts, watches, decides, and says how it ended.

Runs in: the driver. Never imports torch. The main thread draws and minds signals; one other thread runs the attempts.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from raydist.cluster.conductor import start_conductor
from raydist.cluster.group import Group
from raydist.cluster.recovery import Failure, History, Restart, Split, Stop, decide
from raydist.cluster.session import Session, worker_environment
from raydist.cluster.trainer import Attempt
from raydist.cluster.vault import Vaults
from raydist.errors import WorkerFailed
from raydist.observe.run import start_monitor
from raydist.records import Event
from raydist.rundir import RunDir, begin_attempt
from raydist.runlog import last_attempt
from raydist.spec import JobSpec

_REFRESH_S = 0.25
_MONITOR_TIMEOUT_S = 30.0


class View(Protocol):
    """What shows a run to the user: `raydist.report.console.Console`."""

    def update(self, snapshot: dict[str, Any]) -> None:
        """The run as it is now: `RunMonitor.snapshot`."""
        ...

    def event(self, event: Event) -> None:
        """Something happened."""
        ...

    def note(self, text: str) -> None:
        """A word to the user."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """One call of `raydist train`, after everything about it has been checked."""

    spec: JobSpec
    run: RunDir
    dataset: str
    gpus: float
    until: int | None = None
    allow_spec_change: bool = False


@dataclass(frozen=True, slots=True)
class Ending:
    """How the run ended: a status of records.Status, its cause if it stopped, and the signal that interrupted it."""

    status: str
    step: int
    cause: str = ""
    traceback: str = ""
    signal: int | None = None


class Supervisor:
    """Use once: `Supervisor(...).run()`."""

    def __init__(self, request: Request, session: Session, view: View, refresh_s: float = _REFRESH_S) -> None:
        self._request, self._session, self._view, self._refresh_s = request, session, view, refresh_s
        self._spec = request.spec  # of the present attempt
        self._signals: list[int] = []
        self._stop = threading.Event()
        self._running: Attempt | None = None
        self._vaults: Vaults | None = None
        self._ending: Ending | None = None
        self._error: BaseException | None = None
        self._seen = 0

    def run(self) -> Ending:
        """Trains until the run has an ending. The first SIGINT or SIGTERM asks the workers for a checkpoint and a clean
        end; the second ends the attempt at once. Call it in the main thread.
        """
        self._monitor = start_monitor(self._request.run.uri)
        self._conductor = start_conductor()
        attempts = threading.Thread(target=self._attempts, name="raydist-attempts", daemon=True)
        with _handling(self._on_signal):
            attempts.start()
            acted = 0
            while attempts.is_alive():
                attempts.join(self._refresh_s)
                if len(self._signals) > acted:
                    acted = len(self._signals)
                    self._act_on_signal(acted)
                self._show()
            if self._error is not None:
                raise self._error
            assert self._ending is not None
            self._tell(
                self._monitor.end, self._ending.status, **({"cause": self._ending.cause} if self._ending.cause else {})
            )
            self._show()
        return self._ending

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Only noted: a handler runs between any two lines of the main thread.
        self._signals.append(number)
        self._stop.set()

    def _act_on_signal(self, count: int) -> None:
        if count == 1:
            self._view.note("stopping: one checkpoint, then a clean end (again to end at once)")
            self._monitor.command.remote("stop")
        elif self._running is not None:
            self._running.abort()

    def _show(self) -> None:
        snapshot = self._ask(self._monitor.snapshot, self._seen)
        if snapshot is None:
            return
        self._seen = snapshot["next"]
        for raw in snapshot["events"]:
            self._view.event(Event.from_dict(raw))
        self._view.update(snapshot)

    def _ask(self, method: Any, *args: Any) -> Any:
        """What the monitor answers; None if it does not: training goes on without it."""
        import ray
        from ray.exceptions import RayError

        try:
            return ray.get(method.remote(*args), timeout=_MONITOR_TIMEOUT_S)
        except (RayError, TimeoutError):
            return None

    def _tell(self, method: Any, *args: Any, **kwargs: Any) -> None:
        """Waits until the monitor has done it; what it raises passes through."""
        import ray

        ray.get(method.remote(*args, **kwargs), timeout=2 * _MONITOR_TIMEOUT_S)

    # --- in the other thread

    def _attempts(self) -> None:
        try:
            self._ending = self._loop()
        except BaseException as error:
            self._error = error

    def _loop(self) -> Ending:
        import ray

        run = self._request.run
        if self._spec.snapshot_every is not None:
            self._vaults = Vaults(run, private=self._session.private, note=lambda text: self._say("note", text=text))
        number, history = last_attempt(run), History()
        group: Group | None = None
        incident: dict[str, Any] | None = None
        try:
            while True:
                number += 1
                begin_attempt(run, number)  # from now on no earlier one commits, wherever it may still be
                begun = self._monitor.begin_attempt.remote(number, self._spec.cluster.workers, _newest(run))
                if group is None or not group.alive:
                    group = self._group()
                ray.get(begun, timeout=_MONITOR_TIMEOUT_S)  # it must know of the attempt before the first record
                copies = self._vaults.job(places) if self._vaults and (places := group.places()) else None
                resumed = max(_newest(run), copies["step"] or 0 if copies else 0)
                result = group.attempt(number, self._job(number, incident, copies))
                if result.failure is None:
                    value = result.value
                    interrupted = self._signals[0] if value["status"] == "interrupted" and self._signals else None
                    return Ending(value["status"], value["step"], signal=interrupted)
                over, last_step = time.time(), self._last_step()
                # A snapshot that this attempt went on from is progress too, though no checkpoint.
                history = history.at(max(_newest(run), resumed))
                ending = self._after(result.failure, number, history)
                if ending is not None:
                    return ending
                history = history.then(result.failure)
                incident = {"seen": result.seen, "silent_s": result.silent_s, "over": over, "last_step": last_step}
        finally:
            if group is not None:
                group.end()
            if self._vaults is not None:
                self._vaults.close()

    def _group(self) -> Group:
        spec = self._spec
        return Group(
            session=self._session,
            conductor=self._conductor,
            monitor=self._monitor,
            run_name=self._request.run.name,
            size=spec.cluster.workers,
            cpus=spec.cluster.cpus_per_worker,
            gpus=self._request.gpus,
            env=worker_env(spec),
            on_started=self._started,
        )

    def _started(self, running: Attempt) -> None:
        self._running = running

    def _last_step(self) -> int:
        snapshot = self._ask(self._monitor.snapshot, self._seen)
        record = snapshot["record"] if snapshot else None
        return int(record["step"]) if record else 0

    def _job(self, number: int, incident: dict[str, Any] | None, copies: dict[str, Any] | None) -> dict[str, Any]:
        """What every rank of an attempt is given; plain. `incident`: the failure that it follows; `copies`: of `Vaults.job`."""
        request = self._request
        return {
            "spec": self._spec.model_dump(mode="json"),
            "run": request.run.uri,
            "dataset": request.dataset,
            "attempt": number,
            "until": request.until,
            "allow_spec_change": request.allow_spec_change,
            "gpus": request.gpus,
            "begun": time.time(),
            "incident": incident,
            "vault": copies,
        }

    def _after(self, failure: Failure, number: int, history: History) -> Ending | None:
        """What to do after a failure: an Ending, or None to try again."""
        if failure.kind == "aborted" and self._signals:
            return Ending("interrupted", _newest(self._request.run), signal=self._signals[-1])
        self._say(
            "failure",
            attempt=number,
            rank=failure.rank,
            fault=failure.kind,
            cause=failure.cause,
            # Of a death Ray tells a page of guesses; `cause` has what is known.
            traceback=failure.traceback if failure.kind == "user_error" else "",
            echoes=failure.echoes,
        )
        spec = self._spec
        split = Split(spec.train.global_batch, spec.train.micro_batch, spec.cluster.workers)
        match decide(failure, history, spec.recovery, split):
            case Restart(after_s, because, micro_batch):
                self._say("decision", action="restart", because=because, after_s=after_s, micro_batch=micro_batch)
                if micro_batch is not None:
                    train = spec.train.model_copy(update={"micro_batch": micro_batch})
                    self._spec = spec.model_copy(update={"train": train})
                if self._stop.wait(after_s) or self._signals:
                    return Ending("interrupted", _newest(self._request.run), signal=self._signals[0])
                return None
            case Stop(cause, because):
                self._say("decision", action="stop", because=because, after_s=0.0)
                who = "" if failure.rank is None else f"rank {failure.rank}: "
                return Ending(
                    "stopped",
                    _newest(self._request.run),
                    cause=f"{who}{cause} ({because})",
                    traceback=failure.traceback,
                )

    def _say(self, kind: str, **data: Any) -> None:
        self._ask(self._monitor.push, [], [Event(kind, time.time(), data).to_dict()])


def _newest(run: RunDir) -> int:
    steps = run.committed()
    return steps[-1] if steps else 0


def worker_env(spec: JobSpec) -> dict[str, str]:
    """What the workers' environment holds: threads and allocator, the user's NCCL_, GLOO_ and TORCH_ variables, the job's."""
    import os

    passed = {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "GLOO_", "TORCH_", "CUDA_DEVICE_"))}
    return {**worker_environment(max(1, int(spec.cluster.cpus_per_worker))), **passed, **spec.cluster.env}


class _handling:
    """SIGINT and SIGTERM go to `handler` for the time of the block."""

    def __init__(self, handler: Callable[[int, FrameType | None], None]) -> None:
        self._handler = handler

    def __enter__(self) -> None:
        self._before = {s: signal.signal(s, self._handler) for s in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)


def raise_if_stopped(ending: Ending, run: RunDir) -> None:
    """Raises WorkerFailed with the root cause of a run that stopped."""
    if ending.status == "stopped":
        raise WorkerFailed(
            f"run {run.name} stopped after step {ending.step}: {ending.cause}",
            f"the whole story: raydist show {run.uri}; its logs: {run.uri}/logs",
        )
