"""The driver's client of the run's monitor: an actor that may be killed at any time, and that Ray then starts again.

Runs in: the driver, any thread. Never imports torch; imports ray in functions only. Supervisor, RestartLoop, Elasticity,
NodeMonitors, MemoryCheckpoints and DriverInjector call it; it calls raydist.observe.run_monitor.RunMonitor.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from raydist.records import Event

_ANSWER_S = _HANGS_S = 30.0
"""How long a monitor may take to answer; and to learn of an attempt, before it is killed."""
_SNAPSHOT_S = 5.0
_AGAIN_S = 0.5
_LOOK_S = 0.25


class MonitorClient:
    """`actor`: the monitor's handle. `lost()`: whether no actor can be called any more; then no call waits."""

    def __init__(self, actor: Any, lost: Callable[[], bool] = lambda: False) -> None:
        self.actor, self._lost = actor, lost
        self._unsent: list[dict[str, Any]] = []
        self._sending, self._commanding = threading.Lock(), threading.Lock()

    def snapshot(self, seen: int) -> dict[str, Any] | None:
        """The state of the run, with the events from number `seen` on; None if the monitor does not answer."""
        found: dict[str, Any] | None = self._ask(self.actor.snapshot, seen, timeout_s=_SNAPSHOT_S)
        return found

    def last_step(self) -> int:
        """The newest step that the monitor knows; 0 if there is none, or if it does not answer."""
        found = self._ask(self.actor.snapshot, sys.maxsize)
        return int(found["record"]["step"]) if found and found["record"] else 0

    def command(self, present: Callable[[], str | None]) -> None:
        """What the monitor sends to the ranks with its next answer to each: "stop", or None; of calls from two threads, the later
        one's.
        """
        with self._commanding:
            self.actor.command.remote(present())

    def begin_attempt(self, number: int, world_size: int, step: int) -> None:
        """Tells the monitor of an attempt, before its first record. Returns when the monitor knows. `step`: where it starts.

        A monitor that does not answer, as one that is stopped or waits for a dead disk, is killed once. Raises RayError.
        """
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        deadline, killed = time.monotonic() + _ANSWER_S, False
        while True:
            begun = self.actor.begin_attempt.remote(number, world_size, step)
            try:
                ray.get(begun, timeout=_ANSWER_S if killed else _HANGS_S)
                return
            except RayActorError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_AGAIN_S)  # Ray starts it again
            except GetTimeoutError as error:
                if killed:
                    raise GetTimeoutError(
                        f"the run's monitor has not answered for {_HANGS_S + _ANSWER_S:.0f} s"
                    ) from error
                ray.kill(self.actor, no_restart=False)  # of a process that is stopped: after 5 s
                deadline, killed = time.monotonic() + _ANSWER_S, True

    def end(self, status: str, cause: str, timeout_s: float | None = None) -> None:
        """The run has ended. Returns when that is on storage. Raises what the monitor raises, and TimeoutError."""
        import ray

        limit = 2 * _ANSWER_S if timeout_s is None else timeout_s
        ray.get(self.actor.end.remote(status, **({"cause": cause} if cause else {})), timeout=limit)

    def close(self) -> None:
        """The run is over: the monitor exits by itself, as it has a file to delete. Without this, one on a cluster would stay until
        the driver ends: Ray keeps an actor whose handle was pickled outside of a call, as for the node monitors.
        """
        from ray.exceptions import RayError

        with suppress(RayError):
            self.actor.__ray_terminate__.remote()

    def say(self, kind: str, **data: Any) -> None:
        """Records an event with the present time."""
        self.push(Event(kind, time.time(), data))

    def note(self, text: str) -> None:
        """Records an event of kind "note"."""
        self.say("note", text=text)

    def push(self, *events: Event) -> None:
        """Records events. If the monitor does not answer (it may have been killed), the next call sends them again."""
        with self._sending:
            self._unsent += [event.to_dict() for event in events]
            if self._unsent and self._ask(self.actor.push, [], self._unsent) is not None:
                self._unsent.clear()

    def _ask(self, method: Any, *args: Any, timeout_s: float = _ANSWER_S) -> Any:
        """The monitor's answer; None if it does not answer: training continues without it."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        deadline = time.monotonic() + timeout_s
        try:
            asked = method.remote(*args)
            while not self._lost():
                with suppress(GetTimeoutError):
                    return ray.get(asked, timeout=max(0.0, min(_LOOK_S, deadline - time.monotonic())))
                if time.monotonic() > deadline:
                    break
        except (RayError, TimeoutError):
            pass
        return None
