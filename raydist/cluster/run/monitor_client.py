"""The driver's line to its run's monitor, which may be killed at any time and comes back.

Runs in: the driver, any thread. Never imports torch; imports ray in functions only.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from raydist.records import Event

_ANSWER_S = 30.0
_AGAIN_S = 0.5


class MonitorClient:
    """`monitor`: the actor's handle."""

    def __init__(self, monitor: Any) -> None:
        self.monitor = monitor
        self._untold: list[dict[str, Any]] = []
        self._telling = threading.Lock()

    def snapshot(self, seen: int) -> dict[str, Any] | None:
        """The run as it is now, with the events from number `seen` on; None if the monitor does not answer."""
        found: dict[str, Any] | None = self._ask(self.monitor.snapshot, seen)
        return found

    def last_step(self) -> int:
        """The newest step that it has heard of; 0 if there is none, or no answer."""
        found = self.snapshot(sys.maxsize)
        return int(found["record"]["step"]) if found and found["record"] else 0

    def command(self, word: str | None) -> None:
        """What the ranks are told with the next answer that they get."""
        self.monitor.command.remote(word)

    def begin_attempt(self, number: int, world_size: int, step: int) -> None:
        """The monitor must know of an attempt before its first record: returns when it does. `step`: what it goes on from."""
        import ray
        from ray.exceptions import RayActorError

        deadline = time.monotonic() + _ANSWER_S
        while True:
            begun = self.monitor.begin_attempt.remote(number, world_size, step)
            try:
                ray.get(begun, timeout=_ANSWER_S)
                return
            except RayActorError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_AGAIN_S)  # Ray starts it again

    def end(self, status: str, cause: str) -> None:
        """The run has ended: returns when that is on storage. What the monitor raises passes through."""
        import ray

        ray.get(self.monitor.end.remote(status, **({"cause": cause} if cause else {})), timeout=2 * _ANSWER_S)

    def say(self, kind: str, **data: Any) -> None:
        """Something has happened."""
        self.push(Event(kind, time.time(), data))

    def push(self, *events: Event) -> None:
        """Told now, or with the next ones: the monitor may be on its way back after a kill."""
        with self._telling:
            self._untold += [event.to_dict() for event in events]
            if self._untold and self._ask(self.monitor.push, [], self._untold) is not None:
                self._untold.clear()

    def _ask(self, method: Any, *args: Any) -> Any:
        """What the monitor answers; None if it does not: training goes on without it."""
        import ray
        from ray.exceptions import RayError

        try:
            return ray.get(method.remote(*args), timeout=_ANSWER_S)
        except (RayError, TimeoutError):
            return None
