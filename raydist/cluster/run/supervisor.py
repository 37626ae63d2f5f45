"""One run from start to end: updates the display, handles signals, watches Ray's head, and returns how the run ended.

Runs in: the driver, in the main thread (in a sweep: in the trial's thread). Never imports torch; imports ray in functions only.

    main thread      Supervisor --starts--> RestartLoop       the attempts, in a thread of its own
                          |                      |
                          |                  Elasticity -> WorkerGroupSlot -> Group -> Coordinator -> agents
                          |-- abort, cancel --^  |
                          +--> MonitorClient <---+            the run's monitor: commands to the ranks, events, snapshots
                          +--> StopRequest <-----+            the supervisor adds requests; both threads read them
                          +--> HeadOutage <------+            the supervisor calls look(); RestartLoop reads ending()

`Supervisor.build` makes these objects from the bottom up: head outage, monitor client, stop request, elasticity, fault injector,
restart loop, supervisor. Each one gets all that it calls in its constructor.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from types import FrameType
from typing import Any, Protocol

from raydist.cluster import head_monitor
from raydist.cluster.head_monitor import HeadMonitor
from raydist.cluster.private_head import PrivateHead
from raydist.cluster.run.elasticity import Elasticity
from raydist.cluster.run.fault_injector import DriverInjector
from raydist.cluster.run.head_outage import HeadOutage
from raydist.cluster.run.monitor_client import MonitorClient
from raydist.cluster.run.request import Ending, Request, worker_kind
from raydist.cluster.run.restart_loop import RestartLoop
from raydist.cluster.run.stop_request import StopRequest
from raydist.cluster.run.worker_group_slot import WorkerGroupSlot
from raydist.cluster.session import Session
from raydist.records import Event
from raydist.run.directory import RunDir
from raydist.run.log_writer import write_end

_REFRESH_S = 0.5
_FORCED_S = 15.0
"""How long a run may take to end after the second signal."""
_DEAD_END_S = 5.0
"""How long the monitor may take to write the end when the GCS is dead."""
_STEADY_AFTER_S = 10.0
_STEADY_REFRESH_S = 1.0
"""The interval once a run has lasted `_STEADY_AFTER_S`: each snapshot takes a millisecond from ranks that use all cores."""


class View(Protocol):
    """What shows a run to the user: `raydist.report.console.Console`."""

    def update(self, snapshot: dict[str, Any]) -> None:
        """The present state of the run: `RunMonitor.snapshot`."""

    def event(self, event: Event) -> None:
        """An event of the run."""

    def note(self, text: str) -> None:
        """A message to the user."""


class Supervisor:
    """Use once: `Supervisor.build(...).run()`. `slot`: for its `prepare_next`. `lost` and `asked`: see `build`."""

    def __init__(
        self,
        run: RunDir,
        view: View,
        *,
        monitor: MonitorClient,
        stop_request: StopRequest,
        elasticity: Elasticity,
        attempts: RestartLoop,
        outage: HeadOutage,
        injector: DriverInjector | None,
        slot: WorkerGroupSlot,
        lost: Callable[[], BaseException | None] = lambda: None,
        asked: Callable[[], str | None] = lambda: None,
        refresh_s: float = _REFRESH_S,
    ) -> None:
        self._run, self._view, self._slot, self._refresh_s = run, view, slot, refresh_s
        self._monitor, self._stop_request, self._elasticity = monitor, stop_request, elasticity
        self._attempts, self._outage, self._injector = attempts, outage, injector
        self._lost, self._asked = lost, asked
        self._ending: Ending | None = None
        self._error: BaseException | None = None
        self._seen = self._attempt = 0
        self._begun = self._shown = time.monotonic()

    @classmethod
    def build(
        cls,
        request: Request,
        session: Session,
        view: View,
        *,
        lost: Callable[[], BaseException | None] = lambda: None,
        asked: Callable[[], str | None] = lambda: None,
        slot: WorkerGroupSlot | None = None,
        refresh_s: float = _REFRESH_S,
    ) -> Supervisor:
        """All objects of a run, in the order in which they need each other. Starts the run's monitor.

        `lost`: the error to end with when another driver has taken over the run, else None; see `DriverLease.lost`.
        `asked`: who has asked the run to end; see `DriverLease.asked_to_stop`.
        `slot`: workers that the run uses if they fit, and leaves to the next run. None: it starts its own, which end with it.
        """
        run, spec, private = request.run, request.spec, session.private
        own = slot or WorkerGroupSlot(session)
        actor = own.monitor(run.full_uri, request.exporters, spec.model_dump(mode="json"))
        head = PrivateHead(session.address, session.processes) if session.processes else HeadMonitor(session.address)
        outage = HeadOutage(head, spec.recovery.head_timeout, run)
        monitor = MonitorClient(actor, lost=lambda: outage.cut_off)
        own.ready()
        stop_request = StopRequest()
        kind = worker_kind(spec, request.gpus)
        elasticity = Elasticity(spec, kind, run.name, own, monitor, stop_request, private=private)
        injector = DriverInjector(run, monitor, session.address, request.faults) if request.faults else None
        attempts = RestartLoop(
            request, elasticity, monitor, stop_request, outage, injector, private=private, keeps=slot is not None
        )
        return cls(
            run,
            view,
            monitor=monitor,
            stop_request=stop_request,
            elasticity=elasticity,
            attempts=attempts,
            outage=outage,
            injector=injector,
            slot=own,
            lost=lost,
            asked=asked,
            refresh_s=refresh_s,
        )

    def run(self, signals: bool = True) -> Ending:
        """Trains until the run ends. The first SIGINT, SIGTERM or SIGHUP asks the ranks for a checkpoint and a clean end; the
        second ends the attempt at once. Call it in the main thread; or with `signals` False, and pass signals to `stop`.
        """
        stop_request = self._stop_request
        attempts = threading.Thread(target=self._train, name="raydist-attempts", daemon=True)
        with ExitStack() as last, handling(self._on_signal) if signals else nullcontext(), closing(self._outage):
            last.callback(self._end_monitor)
            attempts.start()
            acted, forced = 0, None
            while attempts.is_alive():
                attempts.join(self._refresh_s)
                if not stop_request.signals and (who := self._asked()) is not None:
                    self._view.note(f"stop requested by {who}")
                    self._monitor.say("requested", what="stop", number=0, by=who)
                    self.stop(signal.SIGINT)
                if len(stop_request.signals) > acted:
                    acted = len(stop_request.signals)
                    self._act_on_signal(acted)
                    forced = time.monotonic() if acted > 1 and forced is None else forced
                if forced is not None and time.monotonic() - forced > _FORCED_S:
                    number = stop_request.signals[-1]
                    self._ending = self._ending or Ending("interrupted", self._run.newest_step(), signal=number)
                    break
                if (lost := self._lost()) is not None:
                    self._error = lost  # nothing more is written: the folder is another driver's
                    self._abort()
                if stop_request.cancelled:
                    self._elasticity.cancel()  # again: an attempt may have begun since the first call
                if self._without_head():
                    break
                self._show()
            if attempts.is_alive():
                head_monitor.lost = True  # its thread may be in any call of Ray: nothing may be torn down below it
            if self._error is not None:
                raise self._error
            if self._ending is not None and self._ending.status == "stopped":
                self._outage.look_for_another()
            self._outage.look()
            if self._outage.dead and (self._ending is None or self._ending.status == "stopped"):
                self._ending = self._outage.ending()  # whatever the ranks made of it
            assert self._ending is not None
            self._record_end(self._ending)
            if not self._outage.dead:
                self._show(last=True)
        return self._ending

    @property
    def headless(self) -> bool:
        """Whether Ray's head was silent when it was last looked at: the run's end is then not its own failure."""
        return self._outage.silent

    def stop(self, number: int) -> None:
        """The same as that signal. From any thread."""
        self._stop_request.add(number)

    def cancel(self, number: int) -> None:
        """Ends the run at once, as interrupted by that signal: its ranks are killed, its workers stay for the next run. From any
        thread.
        """
        self._stop_request.add(number, cancel=True)
        self._elasticity.cancel()

    def _without_head(self) -> bool:
        """Whether the head is gone for good. Before that the ranks are asked for a checkpoint: they can train without the head."""
        change, outage = self._outage.look(asked=bool(self._stop_request.signals)), self._outage
        if change == "gone":
            self._ending = self._ending or outage.ending()
            return True
        if change != "same":
            silent = f"{outage.why()}: saving a checkpoint; the run stops{'' if outage.dead else ' unless the head responds'}"
            self._view.note(silent if change == "silent" else f"Ray's head at {outage.address} answers again")
            self._stop_request.want("head", change == "silent")
            self._monitor.command(self._stop_request.command)
        return False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop(number)  # no more than that: a handler runs between any two lines of the main thread

    def _act_on_signal(self, count: int) -> None:
        if self._stop_request.cancelled:
            return
        if count == 1:
            self._view.note("stopping: one checkpoint, then a clean end (again to end at once)")
            self._monitor.command(self._stop_request.command)
        else:
            self._abort()

    def _abort(self) -> None:
        """In a thread: Ray may not answer."""
        threading.Thread(target=self._elasticity.abort, name="raydist-abort", daemon=True).start()

    def _record_end(self, ending: Ending) -> None:
        """Returns when the run's end is on storage: by the monitor, or, if that cannot be called, by this process."""
        from ray.exceptions import RayActorError

        try:
            if self._outage.cut_off:
                raise TimeoutError(self._outage.why())
            if self._injector is not None:
                self._injector.look()
                if ending.status == "finished":
                    self._injector.say_what_is_missing()
            self._monitor.push()
            self._monitor.end(ending.status, ending.cause, _DEAD_END_S if self._outage.dead else None)
        except (RayActorError, TimeoutError) as error:
            self._view.note(
                f"the monitor did not write the run's end, and its last records: {str(error).splitlines()[0]}"
            )
            self._outage.end_monitors()
            write_end(self._run, ending.status, ending.cause)
        except Exception as error:
            if ending.status != "stopped":
                raise
            # The run's own cause is the error to report.
            self._view.note(f"the run's end could not be written down: {error}")

    def _end_monitor(self) -> None:
        if not (head_monitor.lost or self._outage.silent):
            self._monitor.close()

    def _show(self, last: bool = False) -> None:
        if self._injector is not None:
            self._injector.look()
        now = time.monotonic()
        if not last and now - self._begun > _STEADY_AFTER_S and now - self._shown < _STEADY_REFRESH_S:
            return
        self._shown = now
        snapshot = self._monitor.snapshot(self._seen)
        if snapshot is None:
            return
        self._seen = snapshot["next"]
        if self._stop_request.command() and snapshot["command"] is None and not last:
            self._monitor.command(self._stop_request.command)  # the monitor was restarted and has lost the command
        for raw in snapshot["events"]:
            if raw["kind"] == "attempt_started":
                self._attempt = int(raw["attempt"])
            elif raw["kind"] == "checkpoint_saved":
                self._attempts.saved(self._attempt, int(raw["step"]))
            self._view.event(Event.from_dict(raw))
        self._view.update(snapshot)
        if snapshot["record"] is not None:
            self._slot.prepare_next()

    # --- in the attempts thread

    def _train(self) -> None:
        from ray.exceptions import RayError

        try:
            self._ending = self._attempts.run()
        except RayError as error:
            from raydist.cluster.run.ray_errors import lost

            cause = f"{lost(error)}; run the same command again to continue"
            self._ending = Ending("stopped", self._run.newest_step(), cause=cause)
        except BaseException as error:
            self._error = error


class handling:
    """Sends SIGINT, SIGTERM and SIGHUP to `handler` during the block. SIGHUP (the terminal is gone) stays ignored under nohup."""

    def __init__(self, handler: Callable[[int, FrameType | None], None]) -> None:
        self._handler = handler

    def __enter__(self) -> None:
        ends = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            ends.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._handler) for number in ends}

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
