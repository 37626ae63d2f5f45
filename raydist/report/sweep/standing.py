"""The state of a running sweep: the cells that ended last, and the best point so far, folded from its events.

Runs in: the sweep's driver, which passes every event as it happens. Must not import torch or ray.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from raydist.records import Event
from raydist.run.sweep_directory import CellNote
from raydist.run.sweep_state import DONE

KEPT = 100
"""Maximum number of ended cells kept for the display."""


@dataclass(frozen=True, slots=True)
class Over:
    """A cell that has ended and will not run again. `seconds`: since its last start, None if unknown; `value`: its objective."""

    cell: str
    status: str
    cause: str | None
    seconds: float | None
    steps: int | None
    loss: float | None
    eval_loss: float | None
    value: float | None
    tokens_per_second: float | None


@dataclass(frozen=True, slots=True)
class Leader:
    """The best point so far. `value`: the mean objective of its finished cells, whose number is `seeds`."""

    parameters: Mapping[str, Any]
    value: float
    seeds: int


@dataclass(slots=True)
class Live:
    """The state of a running cell, for the display."""

    id: str
    state: str = "waiting for workers"
    total: int = 0
    workers: int = 0
    snapshot: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Spent:
    """Wall-clock hours while a driver ran; GPU-hours and worker-hours while trials had workers."""

    hours: float = 0.0
    gpu_hours: float = 0.0
    worker_hours: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        """The sum of both."""
        return Spent(self.hours + other.hours, self.gpu_hours + other.gpu_hours, self.worker_hours + other.worker_hours)


class Standing:
    """`metric` and `mode`: of the objective. All methods may be called from any thread."""

    def __init__(self, metric: str, mode: str) -> None:
        self.metric = metric
        self._sign = 1 if mode == "min" else -1
        self._lock = threading.Lock()
        """Protects the fields below."""
        self._notes: dict[str, CellNote] = {}
        self._changed: dict[str, dict[str, Any]] = {}
        """Cell -> values that have changed since it began (pbt)."""
        self._began: dict[str, float] = {}
        self._values: dict[int, list[float]] = {}
        """Point -> objectives of its cells that have finished."""
        self._named: dict[int, Mapping[str, Any]] = {}
        """Those points -> their parameters."""
        self._over: deque[Over] = deque(maxlen=KEPT)
        self._count = 0

    def begin(self, cells: Iterable[CellNote], events: Iterable[Event]) -> None:
        """Starts from the cells and events that exist already."""
        with self._lock:
            self._notes |= {note.id: note for note in cells}
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """Takes one event; returns at once."""
        with self._lock:
            self._fold(event)

    def last(self, count: int) -> list[Over]:
        """The cells that ended last, the newest first."""
        with self._lock:
            return list(self._over)[: -count - 1 : -1] if count > 0 else []

    def since(self, count: int) -> tuple[int, list[Over]]:
        """How many cells have ended, and those after the first `count` of them, the oldest first; at most KEPT."""
        with self._lock:
            new = min(self._count - count, len(self._over))
            return self._count, list(self._over)[len(self._over) - new :]

    @property
    def best(self) -> Leader | None:
        """The best point so far; None before a cell has finished with an objective."""
        with self._lock:
            if not self._values:
                return None
            means = {point: math.fsum(values) / len(values) for point, values in self._values.items()}
            best = min(means, key=lambda point: self._sign * means[point])
            return Leader(self._named[best], means[best], len(self._values[best]))

    def _fold(self, event: Event) -> None:
        data = event.data
        if event.kind == "added":
            note = CellNote.from_dict(data["note"])
            self._notes[note.id] = note
        cell = data.get("cell")
        if cell is None:
            return
        if event.kind == "started":
            self._began[cell] = event.at
        elif event.kind == "exploited":
            self._changed.setdefault(cell, {}).update({name: now for name, (_, now) in data["changes"].items()})
        elif event.kind in DONE and data.get("final", event.kind != "failed"):
            self._end(cell, event)

    def _end(self, cell: str, event: Event) -> None:
        data, figures = event.data, event.data.get("figures") or {}
        value = figures.get(self.metric)
        value = float(value) if value is not None and math.isfinite(value) else None
        began = self._began.pop(cell, None)
        self._count += 1
        self._over.append(
            Over(
                cell,
                event.kind,
                data.get("cause") or data.get("because"),
                None if began is None else event.at - began,
                figures.get("steps"),
                figures.get("loss"),
                figures.get("eval_loss"),
                value,
                figures.get("tokens_per_second"),
            )
        )
        note = self._notes.get(cell)
        if event.kind == "finished" and value is not None and note is not None:
            self._values.setdefault(note.point, []).append(value)
            self._named[note.point] = {**note.parameters, **self._changed.get(cell, {})}
