"""Carries records and events off the loop: a bounded buffer, a side thread, and a way to wait until all is durable.

Runs in: rank 0's worker. Knows neither ray nor storage: it is given two callables.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raydist.records import EXPORTED_ONLY, Event, StepRecord

Push = Callable[[list[dict[str, Any]], list[dict[str, Any]]], Mapping[str, Any] | None]
"""(records, events) -> what `RunMonitor.push` gives. May raise: what it was given is then sent again."""

INTERVAL_S = 1.0
CAPACITY = 100_000
FIGURES = 4
"""Large events (records.EXPORTED_ONLY) that wait at most: they are sent once, and again for nobody."""


class Reporter:
    """`step` and `event` never block. What does not fit while the other side is away is dropped, oldest steps first."""

    def __init__(self, push: Push, durable: Callable[[], None]) -> None:
        self._push, self._durable = push, durable
        self._records: deque[dict[str, Any]] = deque(maxlen=CAPACITY)
        self._events: deque[dict[str, Any]] = deque(maxlen=CAPACITY)
        self._figures: deque[dict[str, Any]] = deque(maxlen=FIGURES)
        self._wake = threading.Event()
        self._closed = False
        self._sending = threading.Lock()
        self.command: str | None = None
        """The driver's newest word: "stop", or None."""
        self.traces: Sequence[Sequence[int]] = ()
        """(number, steps) of the traces that somebody waits for, oldest first."""
        self._thread = threading.Thread(target=self._run, name="raydist-reporter", daemon=True)
        self._thread.start()

    def step(self, record: StepRecord) -> None:
        """One step is done."""
        self._records.append(record.to_dict())

    def event(self, event: Event) -> None:
        """Something happened. It is sent at once."""
        if event.kind in EXPORTED_ONLY:
            self._figures.append(event.to_dict())
            return
        self._events.append(event.to_dict())
        self._wake.set()

    def say(self, kind: str, **data: Any) -> None:
        """`event`, now."""
        self.event(Event(kind, time.time(), data))

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Sends what there is and waits until it is durable; False if the other side does not answer in that time.

        For background threads and the end of a run: a watcher that is gone must cost training nothing.
        """
        done = threading.Event()

        def send() -> None:
            if self._send():
                try:
                    self._durable()
                except Exception:
                    return
                done.set()

        threading.Thread(target=send, name="raydist-flush", daemon=True).start()
        return done.wait(timeout_s)

    def told(self, timeout_s: float = 5.0) -> None:
        """`flush`. Raises TimeoutError where that gives False."""
        if not self.flush(timeout_s):
            raise TimeoutError(f"the run's monitor does not answer in {timeout_s:g} s")

    def close(self) -> None:
        """Sends the rest and ends the thread."""
        self._closed = True
        self._wake.set()
        self._thread.join(timeout=5.0)
        self.flush()

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(INTERVAL_S)
            self._wake.clear()
            self._send()

    def _send(self) -> bool:
        with self._sending:
            records, events = _take(self._records), _take(self._events)
            try:
                answer = self._push(records, events + _take(self._figures)) or {}
            except Exception:
                # Back in front of what came meanwhile; the next round tries again.
                _restore(self._records, records)
                _restore(self._events, events)
                return False
            self.command = answer.get("command") or self.command
            self.traces = answer.get("traces", ())
            return True


def _take(queue: deque[dict[str, Any]]) -> list[dict[str, Any]]:
    return [queue.popleft() for _ in range(len(queue))]


def _restore(queue: deque[dict[str, Any]], items: list[dict[str, Any]]) -> None:
    room = CAPACITY - len(queue)
    queue.extendleft(reversed(items[-room:] if room else []))
