"""One run, from its begin to its end: draws, minds signals and the head, and says how it ended.

Runs in: the driver, in the main thread. Never imports torch. One other thread runs the attempts (restart_loop.py).
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from types import FrameType
from typing import Any, Protocol

from raydist.cluster.head_monitor import HeadMonitor
from raydist.cluster.run.elasticity import Membership
from raydist.cluster.run.fault_injector import DriverInjector
from raydist.cluster.run.monitor_client import MonitorClient
from raydist.cluster.run.request import Ending, Request, worker_kind
from raydist.cluster.run.restart_loop import RestartLoop, StopRequest
from raydist.cluster.run.worker_group_slot import WorkerGroupSlot
from raydist.cluster.session import Session
from raydist.records import Event

_REFRESH_S = 0.5
_STEADY_AFTER_S = 10.0
_CALM_REFRESH_S = 1.0
"""The interval once a run has lasted `_STEADY_AFTER_S`: each look takes a millisecond from ranks that fill all cores."""


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


class Supervisor:
    """Use once: `Supervisor(...).run()`."""

    def __init__(
        self,
        request: Request,
        session: Session,
        view: View,
        refresh_s: float = _REFRESH_S,
        lost: Callable[[], BaseException | None] = lambda: None,
        slot: WorkerGroupSlot | None = None,
        asked: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`lost`: the error to end with once another driver has taken the run over, else None; see `DriverLease.lost`.

        `asked`: who has asked the run to end, see `DriverLease.asked_to_stop`.

        `slot`: whose workers the run has, if they fit, and leaves to the next run; None: its own, who end with it.
        """
        self._request, self._session, self._view, self._refresh_s = request, session, view, refresh_s
        self._lost, self._asked = lost, asked
        self._slot = slot or WorkerGroupSlot(session)
        self._keeps = slot is not None
        self._stop_request = StopRequest()
        self._members = Membership(
            request.spec,
            worker_kind(request.spec, request.gpus),
            request.run.name,
            self._slot,
            private=session.private,
            say=lambda kind, **data: self._line.say(kind, **data),
            end_attempt=self._end_attempt,
            wait=self._stop_request.stop.wait,
        )
        self._ending: Ending | None = None
        self._error: BaseException | None = None
        self._seen = 0
        self._begun = self._shown = time.monotonic()
        self._injector: DriverInjector | None = None
        self._head = None if session.private else HeadMonitor(session.address)
        self._headless = False

    def run(self, signals: bool = True) -> Ending:
        """Trains until the run has an ending. The first SIGINT or SIGTERM asks the workers for a checkpoint and a clean
        end; the second ends the attempt at once. Call it in the main thread; or without `signals`, and give them to `stop`.
        """
        self._members.begin()
        request, stop_request = self._request, self._stop_request
        self._line = MonitorClient(
            self._slot.monitor(request.run.full_uri, request.exporters, request.spec.model_dump(mode="json"))
        )
        self._slot.ready()
        if request.faults:
            self._injector = DriverInjector(request.run, self._line.push, self._line.monitor, self._session.address)
        loop = RestartLoop(
            request,
            self._members,
            self._line,
            stop_request,
            self._injector,
            private=self._session.private,
            keeps=self._keeps,
            headless=self._headless_ending,
        )
        attempts = threading.Thread(target=self._train, args=(loop,), name="raydist-attempts", daemon=True)
        with (
            handling(self._on_signal) if signals else nullcontext(),
            closing(self._head) if self._head else nullcontext(),
        ):
            attempts.start()
            acted = 0
            while attempts.is_alive():
                attempts.join(self._refresh_s)
                if not stop_request.signals and (who := self._asked()) is not None:
                    self._view.note(f"`raydist stop`, {who}, asks this run to end")
                    self.stop(signal.SIGINT)
                if len(stop_request.signals) > acted:
                    acted = len(stop_request.signals)
                    self._act_on_signal(acted)
                if (lost := self._lost()) is not None:
                    self._error = lost  # and not a word more into a folder that is another driver's
                    if self._members.group is not None:
                        self._members.group.abort()
                if stop_request.cancelled and self._members.group is not None:
                    self._members.group.cancel()  # once more: what had not begun when it was asked for has by now
                if self._head is not None and self._without_head(self._head):
                    break
                self._show()
            if self._error is not None:
                raise self._error
            assert self._ending is not None
            if self._injector is not None:
                self._injector.look()
            self._line.push()
            try:
                self._line.end(self._ending.status, self._ending.cause)
            except Exception as error:
                if self._ending.status != "stopped":
                    raise
                self._view.note(f"the run's end could not be written down: {error}")  # its cause is what counts
            self._show(last=True)
        return self._ending

    def _without_head(self, head: HeadMonitor) -> bool:
        """Whether the head is gone for good. Before it is, the ranks are asked for a checkpoint: they do not need it to train."""
        silent, limit = head.silent_s, self._request.spec.recovery.head_timeout
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

    def _head_is_gone(self, head: HeadMonitor) -> Ending:
        cause = f"Ray's head at {head.address} has not answered for {head.silent_s:.0f} s; the same command goes on once it does"
        return Ending("stopped", self._request.run.newest_step(), cause=cause)

    def _headless_ending(self) -> Ending | None:
        return self._head_is_gone(self._head) if self._headless and self._head is not None else None

    @property
    def headless(self) -> bool:
        """Whether the cluster's head was silent when it was last looked at: the run's end is then no fault of its own."""
        return self._headless

    def stop(self, number: int) -> None:
        """As if that signal had come. From any thread."""
        self._stop_request.signals.append(number)
        self._stop_request.stop.set()

    def cancel(self, number: int) -> None:
        """Ends the run at once, as interrupted by that signal: its ranks are killed, its workers stay for the next run. From any
        thread.
        """
        self._stop_request.cancelled = True
        self.stop(number)
        if (group := self._members.group) is not None:
            group.cancel()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop(number)  # only notes it: a handler runs between any two lines of the main thread

    def _act_on_signal(self, count: int) -> None:
        if self._stop_request.cancelled:
            return
        if count == 1:
            self._view.note("stopping: one checkpoint, then a clean end (again to end at once)")
            self._line.command("stop")
        elif self._members.group is not None:
            self._members.group.abort()

    def _end_attempt(self, asked: bool) -> None:
        """Asks the ranks for a checkpoint and the end of their attempt, or no longer, unless the user's signals do."""
        self._line.command("stop" if asked or self._stop_request.signals else None)

    def _show(self, last: bool = False) -> None:
        if self._injector is not None:
            self._injector.look()
        now = time.monotonic()
        if not last and now - self._begun > _STEADY_AFTER_S and now - self._shown < _CALM_REFRESH_S:
            return
        self._shown = now
        snapshot = self._line.snapshot(self._seen)
        if snapshot is None:
            return
        self._seen = snapshot["next"]
        if self._stop_request.signals and snapshot["command"] is None and not last:
            self._line.command("stop")  # the monitor was killed since, and knows of nothing
        for raw in snapshot["events"]:
            self._view.event(Event.from_dict(raw))
        self._view.update(snapshot)
        if snapshot["record"] is not None:
            self._slot.foresee()

    # --- in the other thread

    def _train(self, attempts: RestartLoop) -> None:
        from ray.exceptions import RayError

        try:
            self._ending = attempts.run()
        except RayError as error:
            line = (str(error).strip().splitlines() or [""])[0]
            cause = f"the cluster does not answer any more ({type(error).__name__}: {line}); the same command goes on"
            self._ending = Ending("stopped", self._request.run.newest_step(), cause=cause)
        except BaseException as error:
            self._error = error


class handling:
    """SIGINT and SIGTERM go to `handler` for the time of the block."""

    def __init__(self, handler: Callable[[int, FrameType | None], None]) -> None:
        self._handler = handler

    def __enter__(self) -> None:
        self._before = {s: signal.signal(s, self._handler) for s in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
