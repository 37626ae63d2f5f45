"""Isolates exporters from the run: each works in its own thread, behind a bounded queue.

Runs in: the run's monitor. Must not import torch or ray.

    RunMonitor --put--> queue of one exporter --its thread--> attempt, steps, event, samples, then flush
               --wake, every 2 s---------------^

An exporter that raises is called again after `RETRY_S`. Nothing waits for an exporter that does not return. Both are reported
once. Meanwhile the queue keeps items up to `BUDGET`; then the oldest items are dropped.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from raydist import registry
from raydist.observe.exporters import BaseExporter, Facts
from raydist.records import EXPORTED_ONLY, numbers
from raydist.run.directory import RunDir

RETRY_S = 10.0
STUCK_S = 30.0
"""An exporter that does not return for this long is reported."""
BUDGET = 100_000
"""Maximum size of an exporter's queue, in steps; about 75 MB."""
_LINE = 160
_SAMPLE, _LARGE = 4, 2000
"""Weight of a sample and of a large event, in steps."""
_NUMBERS = 24
"""Loads and biases of experts that weigh as much as a step without them."""

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    method: str
    args: tuple[Any, ...]
    rows: int
    weight: int


class ExporterThreads:
    """A run's exporters. Passing data returns at once, from any thread; `settle` and `close` wait, at most `timeout_s`."""

    def __init__(
        self,
        run: RunDir,
        chosen: Sequence[Mapping[str, Any]],
        spec: Mapping[str, Any],
        note: Note,
        retry_s: float = RETRY_S,
    ) -> None:
        self._all = []
        for each in chosen:
            facts = Facts(run, each.get("options", {}), spec, note)
            self._all.append(_ExporterThread(each["name"], partial(_make, each["name"], facts), note, retry_s))

    def attempt(self, number: int, resume_step: int, at: float) -> None:
        """See `BaseExporter.attempt`; also for the next methods. An attempt is never dropped: it marks which steps are void."""
        self._put(_Item("attempt", (number, resume_step, at), 0, 0))

    def steps(self, rows: Sequence[Mapping[str, Any]], at: float) -> None:
        """StepRecords, as dicts."""
        self._put(_Item("steps", (rows, at), len(rows), len(rows) + sum(map(numbers, rows)) // _NUMBERS))

    def event(self, event: Mapping[str, Any]) -> None:
        """An Event, as a dict."""
        self._put(_Item("event", (event,), 1, _LARGE if event["kind"] in EXPORTED_ONLY else 1))

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows of raydist.run.telemetry_schema."""
        self._put(_Item("samples", (rows,), len(rows), _SAMPLE * len(rows)))

    def wake(self) -> None:
        """Starts a flush."""
        for thread in self._all:
            thread.wake()

    def settle(self, timeout_s: float) -> None:
        """Flushes all exporters and waits until each has returned. Reports lost rows."""
        deadline = time.monotonic() + timeout_s
        rounds = [thread.wake() for thread in self._all]
        for thread, number in zip(self._all, rounds, strict=True):
            thread.settle(number, deadline)

    def close(self, timeout_s: float) -> None:
        """Ends the run's export: a last flush of each exporter, waiting at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        for thread in self._all:
            thread.close()
        for thread in self._all:
            thread.join(deadline)

    def _put(self, item: _Item) -> None:
        for thread in self._all:
            thread.put(item)


def _make(name: str, facts: Facts) -> BaseExporter:
    made: BaseExporter = registry.load("exporter", name)(facts)
    return made


class _ExporterThread:
    """One exporter, its queue and its thread."""

    def __init__(self, name: str, make: Callable[[], BaseExporter], note: Note, retry_s: float) -> None:
        self._name, self._make, self._note, self._retry_s = name, make, note, retry_s
        self._exporter: BaseExporter | None = None
        self._changed = threading.Condition()
        """Guards the fields below; never held while the exporter works."""
        self._items: deque[_Item] = deque()
        self._weight = 0
        self._woken = self._closing = False
        self._working, self._since, self._rounds = False, 0.0, 0
        self._failing, self._retry_at = False, 0.0
        self._flush_pending = False
        """Whether the last flush raised. Then the exporter gets nothing new until a flush succeeds."""
        self._reported = False
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name=f"raydist-export-{name}", daemon=True)
        self._thread.start()

    def put(self, item: _Item) -> None:
        with self._changed:
            self._items.append(item)
            self._weight += item.weight
            while self._weight > BUDGET and len(self._items) > 1:
                at = next(i for i, old in enumerate(self._items) if old.weight)  # past attempts, of which there are few
                old = self._items[at]
                del self._items[at]
                self._weight -= old.weight
                self._lost += old.rows

    def wake(self) -> int:
        """Returns the number of the round after which everything put before is exported."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()
            stuck, number = self._stuck, self._rounds + (2 if self._working else 1)
        if stuck:
            self._report(f"has not returned for {STUCK_S:g} s")
        return number

    def settle(self, number: int, deadline: float) -> None:
        with self._changed:
            if not self._stuck:
                self._changed.wait_for(lambda: self._rounds >= number, deadline - time.monotonic())
            lost, self._lost = self._lost, 0
        if lost:
            self._note(f'exporter "{self._name}": {lost} rows did not reach it')

    def close(self) -> None:
        with self._changed:
            self._closing = self._woken = True
            self._changed.notify_all()

    def join(self, deadline: float) -> None:
        if not self._stuck:
            self._thread.join(max(deadline - time.monotonic(), 0.0))

    @property
    def _stuck(self) -> bool:
        return self._working and time.monotonic() - self._since > STUCK_S

    # --- in its thread

    def _run(self) -> None:
        closing = False
        while not closing:
            with self._changed:
                self._changed.wait_for(lambda: self._woken)
                self._woken, closing = False, self._closing
                if self._failing and time.monotonic() < self._retry_at and not closing:
                    self._rounds += 1
                    self._changed.notify_all()
                    continue
                items, self._items, self._weight = self._items, deque(), 0
                self._working, self._since = True, time.monotonic()
            self._round(items)
            if closing and self._exporter is not None:
                self._try(self._exporter.close)
            with self._changed:
                self._working, self._rounds = False, self._rounds + 1
                self._changed.notify_all()

    def _round(self, items: deque[_Item]) -> None:
        """Creates the exporter if needed. Repeats a flush that failed; then passes the new items and flushes again."""
        if self._exporter is None and items:  # created late: a run that fails early then costs nothing
            self._exporter = self._try(self._make)
        if self._exporter is None or (self._flush_pending and not self._flushed(self._exporter)):
            with self._changed:
                self._items.extendleft(reversed(items))
                self._weight += sum(item.weight for item in items)
            return
        for item in items:
            try:
                getattr(self._exporter, item.method)(*item.args)
            except Exception as error:
                self._report(f"failed: {_line(error)}")
                with self._changed:
                    self._lost += item.rows
        self._flushed(self._exporter)

    def _flushed(self, exporter: BaseExporter) -> bool:
        self._try(exporter.flush)
        self._flush_pending = self._failing
        return not self._failing

    def _try(self, call: Callable[[], Any]) -> Any:
        """Returns the result of `call`. If it raises: returns None, and sets the time of the next try."""
        try:
            result = call()
        except Exception as error:
            self._failing, self._retry_at = True, time.monotonic() + self._retry_s
            self._report(f"failed: {_line(error)}")
            return None
        self._failing = False
        return result

    def _report(self, what: str) -> None:
        if self._reported:
            return
        self._reported = True
        text = f'exporter "{self._name}" {what}; training continues, and it is tried again'
        if self._closing:
            print(f"raydist: {text}", file=sys.stderr, flush=True)  # the run's log is closed
        else:
            self._note(text)


def _line(error: Exception) -> str:
    """The error's type and the first line of its message, shortened if it is long."""
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {line if len(line) <= _LINE else line[: _LINE - 1] + '…'}"
