"""One run, from its first attempt to its last: starts attempts, watches, decides, and says how it ended.

Runs in: the driver. Never imports torch. The main thread draws and minds signals; one other thread runs the attempts.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from raydist.cluster.agents import Agents
from raydist.cluster.cause import Failure
from raydist.cluster.crew import Crew
from raydist.cluster.group import Group
from raydist.cluster.headwatch import HeadWatch
from raydist.cluster.injector import DriverInjector
from raydist.cluster.membership import Membership, NoRoom
from raydist.cluster.recovery import History, Restart, Split, Stop, decide
from raydist.cluster.session import Session, worker_environment
from raydist.cluster.trainer import WorkerKind
from raydist.cluster.vault import Vaults
from raydist.errors import WorkerFailed
from raydist.faults import Fault
from raydist.observe.run import DEFAULT_EXPORTERS
from raydist.records import Event
from raydist.rundir import RunDir, begin_attempt
from raydist.runlog import last_attempt
from raydist.spec import JobSpec
from raydist.worker.checkpoint.replicas import newest_attempt
from raydist.worker.rest import STRIDE_S

_REFRESH_S = 0.5
_CALM_REFRESH_S = 1.0
"""Once the run is in its stride: each look takes a millisecond from ranks that fill all cores."""
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
    faults: Sequence[Fault] = ()
    exporters: Sequence[Mapping[str, Any]] = DEFAULT_EXPORTERS


@dataclass(frozen=True, slots=True)
class Ending:
    """How the run ended: a status of records.Status, its cause if it stopped, and the signal that interrupted it; None where its
    crew had no room for its workers.
    """

    status: str
    step: int
    cause: str = ""
    traceback: str = ""
    signal: int | None = None


class Supervisor:
    """Use once: `Supervisor(...).run()`."""

    def __init__(
        self,
        request: Request,
        session: Session,
        view: View,
        refresh_s: float = _REFRESH_S,
        lost: Callable[[], BaseException | None] = lambda: None,
        crew: Crew | None = None,
    ) -> None:
        """`lost`: the error to end with once another driver has taken the run over, else None; see `DriverLease.lost`.

        `crew`: whose workers the run has, if they fit, and leaves to the next run; None: its own, who end with it.
        """
        self._request, self._session, self._view, self._refresh_s = request, session, view, refresh_s
        self._lost = lost
        self._crew = crew or Crew(session)
        self._keeps = crew is not None
        self._spec = request.spec  # of the present attempt
        self._members = Membership(
            request.spec,
            worker_kind(request.spec, request.gpus),
            request.run.name,
            self._crew,
            private=session.private,
            say=self._say,
            end_attempt=self._end_attempt,
            wait=lambda seconds: self._stop.wait(seconds),
        )
        self._signals: list[int] = []
        self._stop = threading.Event()
        self._cancelled = False
        self._vaults: Vaults | None = None
        self._agents: Agents | None = None
        self._ending: Ending | None = None
        self._error: BaseException | None = None
        self._untold: list[dict[str, Any]] = []
        self._telling = threading.Lock()
        self._seen = 0
        self._begun = self._shown = time.monotonic()
        self._injector: DriverInjector | None = None
        self._head = None if session.private else HeadWatch(session.address)
        self._headless = False

    def run(self, signals: bool = True) -> Ending:
        """Trains until the run has an ending. The first SIGINT or SIGTERM asks the workers for a checkpoint and a clean
        end; the second ends the attempt at once. Call it in the main thread; or without `signals`, and give them to `stop`.
        """
        self._members.begin()
        self._monitor = self._crew.monitor(
            self._request.run.full_uri, self._request.exporters, self._spec.model_dump(mode="json")
        )
        self._crew.ready()
        if self._request.faults:
            self._injector = DriverInjector(self._request.run, self._push, self._monitor, self._session.address)
        attempts = threading.Thread(target=self._attempts, name="raydist-attempts", daemon=True)
        with (
            handling(self._on_signal) if signals else nullcontext(),
            closing(self._head) if self._head else nullcontext(),
        ):
            attempts.start()
            acted = 0
            while attempts.is_alive():
                attempts.join(self._refresh_s)
                if len(self._signals) > acted:
                    acted = len(self._signals)
                    self._act_on_signal(acted)
                if (lost := self._lost()) is not None:
                    self._error = lost  # and not a word more into a folder that is another driver's
                    if self._members.group is not None:
                        self._members.group.abort()
                if self._cancelled and self._members.group is not None:
                    self._members.group.cancel()  # once more: what had not begun when it was asked for has by now
                if self._head is not None and self._without_head(self._head):
                    break
                self._show()
            if self._error is not None:
                raise self._error
            assert self._ending is not None
            if self._injector is not None:
                self._injector.look()
            cause = {"cause": self._ending.cause} if self._ending.cause else {}
            self._push()
            try:
                self._tell(self._monitor.end, self._ending.status, **cause)
            except Exception as error:
                if self._ending.status != "stopped":
                    raise
                self._view.note(f"the run's end could not be written down: {error}")  # its cause is what counts
            self._show(last=True)
        return self._ending

    def _without_head(self, head: HeadWatch) -> bool:
        """Whether the head is gone for good. Before it is, the ranks are asked for a checkpoint: they do not need it to train."""
        silent, limit = head.silent_s, self._spec.recovery.head_timeout
        if silent > limit:
            self._headless = True
            self._ending = self._ending or self._head_is_gone(head)
            return True
        if (silent > limit / 2) != self._headless:
            self._headless = silent > limit / 2
            text = "it answers again" if not self._headless else "one checkpoint, and the run ends unless it comes back"
            self._view.note(f"Ray's head at {head.address} is silent: {text}")
            self._end_attempt(self._headless)
        return False

    def _head_is_gone(self, head: HeadWatch) -> Ending:
        cause = f"Ray's head at {head.address} has not answered for {head.silent_s:.0f} s; the same command goes on once it does"
        return Ending("stopped", _newest(self._request.run), cause=cause)

    @property
    def headless(self) -> bool:
        """Whether the cluster's head was silent when it was last looked at: the run's end is then no fault of its own."""
        return self._headless

    def stop(self, number: int) -> None:
        """As if that signal had come. From any thread."""
        self._signals.append(number)
        self._stop.set()

    def cancel(self, number: int) -> None:
        """Ends the run at once, as interrupted by that signal: its ranks are killed, its workers stay for the next run. From any
        thread.
        """
        self._cancelled = True
        self.stop(number)
        if (group := self._members.group) is not None:
            group.cancel()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop(number)  # only notes it: a handler runs between any two lines of the main thread

    def _act_on_signal(self, count: int) -> None:
        if self._cancelled:
            return
        if count == 1:
            self._view.note("stopping: one checkpoint, then a clean end (again to end at once)")
            self._monitor.command.remote("stop")
        elif self._members.group is not None:
            self._members.group.abort()

    def _end_attempt(self, asked: bool) -> None:
        """Asks the ranks for a checkpoint and the end of their attempt, or no longer, unless the user's signals do."""
        self._monitor.command.remote("stop" if asked or self._signals else None)

    def _show(self, last: bool = False) -> None:
        if self._injector is not None:
            self._injector.look()
        now = time.monotonic()
        if not last and now - self._begun > STRIDE_S and now - self._shown < _CALM_REFRESH_S:
            return
        self._shown = now
        snapshot = self._ask(self._monitor.snapshot, self._seen)
        if snapshot is None:
            return
        self._seen = snapshot["next"]
        for raw in snapshot["events"]:
            self._view.event(Event.from_dict(raw))
        self._view.update(snapshot)
        if snapshot["record"] is not None:
            self._crew.foresee()

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
        from ray.exceptions import RayError

        try:
            self._ending = self._loop()
        except RayError as error:
            line = (str(error).strip().splitlines() or [""])[0]
            cause = f"the cluster does not answer any more ({type(error).__name__}: {line}); the same command goes on"
            self._ending = Ending("stopped", _newest(self._request.run), cause=cause)
        except BaseException as error:
            self._error = error

    def _announce(self, number: int) -> None:
        """The monitor must know of an attempt before its first record. One that was just killed comes back."""
        import ray
        from ray.exceptions import RayActorError

        deadline = time.monotonic() + _MONITOR_TIMEOUT_S
        while True:
            begun = self._monitor.begin_attempt.remote(number, self._members.team, _newest(self._request.run))
            try:
                ray.get(begun, timeout=_MONITOR_TIMEOUT_S)
                return
            except RayActorError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_REFRESH_S)  # Ray starts it again

    def _loop(self) -> Ending:
        run = self._request.run
        number, history = max(last_attempt(run), newest_attempt(run, self._spec.checkpoint.replicas)), History()
        if self._spec.snapshot_every is not None:
            self._vaults = Vaults(run, private=self._session.private, note=self._tell_note)
        if self._spec.observe.interval_s is not None:
            self._agents = Agents(
                run,
                self._monitor,
                self._spec.observe.interval_s,
                private=self._session.private,
                env=worker_env(self._spec),
                note=self._tell_note,
            )
        incident: dict[str, Any] | None = None
        try:
            while True:
                group = self._gather()
                if isinstance(group, Ending):
                    return group
                number += 1
                begin_attempt(run, number)  # from now on no earlier one commits, wherever it may still be
                self._announce(number)
                places = group.places(self._members.team, self._members.look)
                copies = self._vaults.job(places) if self._vaults and places else None
                if self._agents is not None:
                    self._agents.watch(places.values())
                resumed = max(_newest(run), copies["step"] or 0 if copies else 0)
                result = group.attempt(
                    self._job(number, incident, copies), self._members.team, self._monitor, self._members.look
                )
                if result.failure is None:
                    value = result.value
                    if value["status"] != "interrupted" or self._signals:
                        interrupted = self._signals[0] if value["status"] == "interrupted" else None
                        return Ending(value["status"], value["step"], signal=interrupted)
                    if self._headless and self._head is not None:
                        return self._head_is_gone(self._head)
                    self._members.leave()
                    incident = None
                    continue
                over, last_step = time.time(), self._last_step()
                self._members.lost(group.gone)
                # A snapshot that this attempt went on from is progress too, though no checkpoint.
                history = history.at(max(_newest(run), resumed))
                ending = self._after(result.failure, number, history)
                if ending is not None:
                    return ending
                history = history.then(result.failure)
                incident = {"seen": result.seen, "silent_s": result.silent_s, "over": over, "last_step": last_step}
        finally:
            self._members.close(self._keeps)
            if self._vaults is not None:
                self._vaults.close()
            if self._agents is not None:
                self._agents.close()

    def _gather(self) -> Group | Ending:
        """The group of the next attempt; an Ending if there is none."""
        found = self._members.gather()
        if found is None:
            return Ending("interrupted", _newest(self._request.run), signal=self._signals[0])
        if isinstance(found, Stop):
            self._say("decision", action="stop", because=found.because, after_s=0.0)
            return Ending("stopped", _newest(self._request.run), cause=f"{found.cause} ({found.because})")
        if isinstance(found, NoRoom):
            self._say("decision", action="yield", because=found.because)
            return Ending("interrupted", _newest(self._request.run), cause=found.because)
        return found

    def _last_step(self) -> int:
        snapshot = self._ask(self._monitor.snapshot, self._seen)
        record = snapshot["record"] if snapshot else None
        return int(record["step"]) if record else 0

    def _job(self, number: int, incident: dict[str, Any] | None, copies: dict[str, Any] | None) -> dict[str, Any]:
        """What every rank of an attempt is given; plain. `incident`: the failure that it follows; `copies`: of `Vaults.job`."""
        request = self._request
        return {
            "spec": self._spec.model_dump(mode="json"),
            "run": request.run.full_uri,
            "dataset": request.dataset,
            "attempt": number,
            "until": request.until,
            "allow_spec_change": request.allow_spec_change,
            "faults": [fault.model_dump(mode="json") for fault in request.faults],
            "gpus": request.gpus,
            "begun": time.time(),
            "incident": incident,
            "vault": copies,
        }

    def _after(self, failure: Failure, number: int, history: History) -> Ending | None:
        """What to do after a failure: an Ending, or None to try again."""
        if self._cancelled or (failure.kind == "aborted" and self._signals):
            return Ending("interrupted", _newest(self._request.run), signal=self._signals[-1])
        if self._injector is not None:
            self._injector.look()  # what was done to it comes first
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
        split = Split(spec.train.global_batch, spec.train.micro_batch, self._members.team)
        known = not self._session.private and failure.node is not None
        elsewhere = known and self._members.room(without=failure.node) >= spec.cluster.least
        match decide(failure, history, spec.recovery, split, elsewhere=elsewhere):
            case Restart(after_s, because, micro_batch, exclude):
                told = {"after_s": after_s, "micro_batch": micro_batch, "exclude": exclude}
                self._say("decision", action="restart", because=because, **told)
                if exclude is not None:
                    self._members.exclude(exclude)
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

    def _tell_note(self, text: str) -> None:
        self._say("note", text=text)

    def _say(self, kind: str, **data: Any) -> None:
        self._push(Event(kind, time.time(), data))

    def _push(self, *events: Event) -> None:
        """Told now, or with the next ones: the monitor may be on its way back after a kill. From any thread."""
        with self._telling:
            self._untold += [event.to_dict() for event in events]
            if self._untold and self._ask(self._monitor.push, [], self._untold) is not None:
                self._untold.clear()


def _newest(run: RunDir) -> int:
    steps = run.committed()
    return steps[-1] if steps else 0


def worker_kind(spec: JobSpec, gpus: float) -> WorkerKind:
    """What a worker of that job is. `gpus`: of each."""
    return WorkerKind(spec.cluster.cpus_per_worker, gpus, worker_env(spec))


def worker_env(spec: JobSpec) -> dict[str, str]:
    """What the workers' environment holds: threads and allocator, the user's NCCL_, GLOO_ and TORCH_ variables, the job's."""
    import os

    passed = {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "GLOO_", "TORCH_", "CUDA_DEVICE_"))}
    return {**worker_environment(max(1, int(spec.cluster.cpus_per_worker))), **passed, **spec.cluster.env}


class handling:
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
