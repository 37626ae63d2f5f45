"""Writes a row for each ended trial to the destinations of the base job's exporters: TensorBoard's HPARAMS, MLflow.

Runs in: the driver; each destination has a thread. Imports neither ray nor torch.

    the sweep's log --on_event--> ResultExport --a trial has ended for good--> queue per destination --thread--> write, if missing

Only the end of the sweep waits for it, for a limited time. A failed write is retried; missing rows are reported once, at the end.
Rows that a driver did not write are written by the next one: they are made from the sweep's events, so they are the same.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from raydist.observe.sweep_results import Row, Rows
from raydist.records import Event
from raydist.report.sweep.figures import spent
from raydist.run.sweep_directory import CellNote, SweepDir
from raydist.run.sweep_state import DONE, fold

RETRY_S, CLOSE_S = 10.0, 10.0
_LINE = 160
_OF_NO_ROW = frozenset({"queued", "report"})
"""Frequent kinds of events that add nothing to a row."""


class Place(Protocol):
    """`raydist.observe.sweep_results.Place`."""

    @property
    def exporter(self) -> str:
        """Its name."""

    def open(self) -> Rows:
        """Connects. May raise."""


class ResultExport:
    """`metric`: the objective's. Between `begin` and `close` it gets every event of the sweep."""

    def __init__(
        self,
        folder: SweepDir,
        places: Iterable[Place],
        metric: str,
        retry_s: float = RETRY_S,
        tell: Callable[[str], None] = lambda line: print(f"raydist: {line}", file=sys.stderr),
    ) -> None:
        self._folder, self._metric, self._tell = folder, metric, tell
        self._writers = [_Writer(place, self._row, retry_s) for place in places]
        self._notes: dict[str, CellNote] = {}
        self._events: defaultdict[str, list[Event]] = defaultdict(list)
        """Trial that has not ended -> its events."""

    def begin(self, trials: Iterable[CellNote], events: Iterable[Event]) -> None:
        """Starts from the events of earlier drivers: ended trials without a row get one."""
        self._notes = {note.id: note for note in trials}
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """One more event. Thread-safe; returns at once."""
        if not self._writers or event.kind in _OF_NO_ROW:
            return
        if event.kind == "added":
            added = CellNote.from_dict(event.data["note"])
            self._notes[added.id] = added
        trial = event.data.get("cell")
        if trial is None:
            return
        self._events[trial].append(event)
        over = event.kind in DONE and event.data.get("final", event.kind != "failed")
        if over and (note := self._notes.get(trial)) is not None:
            known = self._events.pop(trial)
            for writer in self._writers:
                writer.put(note, known)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """The sweep has ended: makes one last attempt, with that timeout. Reports how many rows are missing."""
        deadline = time.monotonic() + timeout_s
        for writer in self._writers:
            writer.close()
        for writer in self._writers:
            if (line := writer.join(deadline)) is not None:
                self._tell(line)

    def _row(self, note: CellNote, events: Sequence[Event]) -> Row:
        state, at = fold(events)[note.id], events[-1].at
        seconds, _ = spent(state, self._folder.run(note.id), at)
        return Row(
            note.id,
            note.point,
            note.seed,
            note.parameters,
            state.status,
            state.cause,
            state.stretches[0].start if state.stretches else at,
            at,
            seconds,
            state.figures,
            self._metric,
        )


class _Writer:
    """The rows that wait for one destination, and the thread that writes them."""

    def __init__(self, place: Place, row: Callable[[CellNote, Sequence[Event]], Row], retry_s: float) -> None:
        self._place, self._row, self._retry_s = place, row, retry_s
        self._changed = threading.Condition()
        """Guards the fields below; never held during a write."""
        self._waiting: deque[tuple[CellNote, Sequence[Event]]] = deque()
        self._retry_at = 0.0
        self._closing = False
        self._error = "it does not answer"
        self._rows: Rows | None = None
        self._thread: threading.Thread | None = None

    def put(self, note: CellNote, events: Sequence[Event]) -> None:
        with self._changed:
            self._waiting.append((note, events))
            if self._thread is None:  # started with the first row only
                self._thread = threading.Thread(target=self._run, name="raydist-rows", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def join(self, deadline: float) -> str | None:
        """A line with the number of missing rows; None if there are none."""
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        with self._changed:
            missing = len(self._waiting)
        if not missing:
            return None
        return (
            f"rows for {self._place.exporter}: {missing:,} trial{'s have' if missing > 1 else ' has'} none ({self._error}); "
            "the same command writes them"
        )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._due(), self._timeout())
                closing = self._closing
                tries = len(self._waiting) if closing or self._due() else 0
            for _ in range(tries):
                if not self._one() and not closing:
                    break
            if closing:
                return

    def _due(self) -> bool:
        return bool(self._waiting) and time.monotonic() >= self._retry_at

    def _timeout(self) -> float | None:
        return max(0.0, self._retry_at - time.monotonic()) if self._waiting else None

    def _one(self) -> bool:
        """Writes the first waiting row; returns whether it is written. If not, it is retried after the others."""
        note, events = self._waiting[0]
        try:
            if self._rows is None:
                self._rows = self._place.open()
            if not self._rows.has(note.id):
                self._rows.write(self._row(note, events))
        except Exception as error:  # an unreachable destination must not affect the sweep
            line = (str(error).strip().splitlines() or [""])[0]
            self._error = f"{type(error).__name__}: {line[:_LINE]}"
            with self._changed:
                self._retry_at = time.monotonic() + self._retry_s
                self._waiting.rotate(-1)
            return False
        with self._changed:
            self._waiting.popleft()
        return True
