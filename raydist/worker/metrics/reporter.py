"""Sends records and events from the loop to the monitor: a bounded buffer, a thread, and a way to wait until all is durable.

Runs in: rank 0's worker. Imports neither ray nor storage: it gets two callables.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from raydist.records import EXPORTED_ONLY, LISTS, Event, StepRecord, numbers

Push = Callable[[list[dict[str, Any]], list[dict[str, Any]]], Mapping[str, Any] | None]
"""(records, events) -> the reply of `RunMonitor.push`. If it raises, the same data is sent again."""

INTERVAL_S = 1.0
FLUSH_S = 5.0
CAPACITY = 100_000
UNSENT = "unsent"
"""The key in a checkpoint's plain state."""
UNSENT_RECORDS, UNSENT_EVENTS = 10_000, 1000
"""The most that a checkpoint contains: about 5 MB of its manifest."""
NUMBERS = 1 << 21
"""Most loads and biases of experts that are buffered, about 64 MB: older steps are sent without theirs."""
_NO_LISTS = dict.fromkeys(LISTS)
FIGURES = 4
"""Most large events (records.EXPORTED_ONLY) that are buffered. They are sent once, and not repeated after an error."""


class Reporter:
    """`step` and `event` never block. While the monitor does not answer, the oldest steps are dropped if the buffer is full."""

    def __init__(self, push: Push, durable: Callable[[], None]) -> None:
        self._push, self._durable = push, durable
        self._records: deque[dict[str, Any]] = deque(maxlen=CAPACITY)
        self._events: deque[dict[str, Any]] = deque(maxlen=CAPACITY)
        self._figures: deque[dict[str, Any]] = deque(maxlen=FIGURES)
        self._large = CAPACITY
        """The newest so many steps are buffered with their loads."""
        self._sent: tuple[list[dict[str, Any]], list[dict[str, Any]]] = [], []
        """Records and events of a push that was not answered yet."""
        self._wake = threading.Event()
        self._closed = False
        self._sending = threading.Lock()
        self.command: str | None = None
        """The driver's newest command: "stop", or None."""
        self.traces: Sequence[Sequence[int]] = ()
        """(number, steps) of the requested traces, oldest first."""
        self._saves: Sequence[int] = ()
        self._saved: set[int] = set()
        """Numbers of the requested checkpoints, and of those that were saved."""
        self._thread = threading.Thread(target=self._run, name="raydist-reporter", daemon=True)
        self._thread.start()

    def step(self, record: StepRecord) -> None:
        """Records a completed step."""
        row = record.to_dict()
        self._records.append(row)
        if size := numbers(row):
            self._large = max(NUMBERS // size, 1)
        with suppress(IndexError):  # not so many are waiting
            self._records[-1 - self._large].update(_NO_LISTS)

    def event(self, event: Event) -> None:
        """Records an event. It is sent at once."""
        if event.kind in EXPORTED_ONLY:
            self._figures.append(event.to_dict())
            return
        self._events.append(event.to_dict())
        self._wake.set()

    def say(self, kind: str, **data: Any) -> None:
        """`event`, with the current time."""
        self.event(Event(kind, time.time(), data))

    def flush(self) -> bool:
        """Sends everything and waits until it is durable; False if the monitor does not answer in FLUSH_S.

        For background threads and the end of a run: a lost monitor must not delay training.
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
        return done.wait(FLUSH_S)

    def require_flush(self) -> None:
        """`flush`. Raises TimeoutError if it gives False."""
        if not self.flush():
            raise TimeoutError(f"the run's monitor does not answer in {FLUSH_S:g} s")

    def before_commit(self, step: int) -> dict[str, Any]:
        """Flushes. What a checkpoint of `step` must contain so that the records of the steps before it are not lost with this
        process: nothing; or, if the monitor does not answer, {UNSENT: what it has not received}, without loads of experts.
        """
        if self.flush():
            return {}
        records, events = ([*sent, *left] for sent, left in zip(self._sent, (self._records, self._events), strict=True))
        records = [record | _NO_LISTS for record in records if record["step"] <= step][-UNSENT_RECORDS:]
        events = json.loads(json.dumps(events[-UNSENT_EVENTS:], default=str))  # plain, as in the log
        return {UNSENT: {"records": records, "events": events}} if records or events else {}

    def resend(self, unsent: Mapping[str, Any], attempt: int) -> None:
        """Sends what an earlier attempt could not, from the checkpoint that this one resumes from, as records of this attempt."""
        self._records.extend({**record, "attempt": attempt} for record in unsent["records"])
        self._events.extend(unsent["events"])

    def close(self) -> None:
        """Sends the rest and stops the thread."""
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
            self._sent = records, events = _take(self._records), _take(self._events)
            try:
                answer = self._push(records, events + _take(self._figures)) or {}
            except Exception:
                # Back before newer data; the next round tries again.
                for row in records[: max(len(records) + len(self._records) - self._large, 0)]:
                    row.update(_NO_LISTS)
                _restore(self._records, records)
                _restore(self._events, events)
                return False
            finally:
                self._sent = [], []
            self.command = answer.get("command") or self.command
            self.traces, self._saves = answer.get("traces", ()), answer.get("saves", ())
            return True

    @property
    def wants_checkpoint(self) -> bool:
        """Whether a user has requested one that is not saved."""
        return any(number not in self._saved for number in self._saves)

    def saves(self) -> None:
        """The checkpoint that is saved now answers all requests so far."""
        self._saved.update(self._saves)


def _take(queue: deque[dict[str, Any]]) -> list[dict[str, Any]]:
    return [queue.popleft() for _ in range(len(queue))]


def _restore(queue: deque[dict[str, Any]], items: list[dict[str, Any]]) -> None:
    room = CAPACITY - len(queue)
    queue.extendleft(reversed(items[-room:] if room else []))
