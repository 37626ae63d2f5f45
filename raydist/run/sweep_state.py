"""The state of each trial of a sweep, computed from its events. Pure.

Runs anywhere. The driver continues from it after a restart, and `raydist sweep results` shows it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from raydist.records import Event

CellStatus = Literal["waiting", "running", "finished", "stopped", "failed", "paused"]
"""waiting: not started, or to be tried again; stopped: by the scheduler, for good; failed: for good; paused: continues when the
sweep is started again. A trial whose driver was killed is `running` here: `raydist.report.sweep.results` reports it as lost."""
DONE: frozenset[CellStatus] = frozenset({"finished", "stopped", "failed"})


@dataclass(slots=True)
class Stretch:
    """A period in which a trial had workers. `end` is None while it has them, or if its driver was killed."""

    start: float
    workers: int
    gpus: float
    end: float | None = None


@dataclass(slots=True)
class CellState:
    """One trial. Times are Unix seconds."""

    status: CellStatus = "waiting"
    failures: int = 0
    cause: str | None = None
    """Why it last failed, or was stopped or paused; None once it continues, or has finished."""
    micro_batch: int | None = None
    """The micro-batch of its next start, with data.batching its max_tokens, if it differs from its spec's."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Computed by raydist.report.sweep.figures.measure when it last ended."""
    stretches: list[Stretch] = field(default_factory=list)
    lineage: list[dict[str, Any]] = field(default_factory=list)
    """Data of its events `exploited`."""


def fold(events: Iterable[Event]) -> dict[str, CellState]:
    """Trial id -> its state, for trials with events. Unknown kinds of later versions are ignored."""
    found: dict[str, CellState] = {}
    for event in events:
        name = event.data.get("cell")
        if name is None:
            continue
        cell, data = found.setdefault(str(name), CellState()), event.data
        match event.kind:
            case "started":
                cell.status, cell.cause = "running", None
                cell.stretches.append(
                    Stretch(event.at, max(1, int(data.get("workers") or 1)), float(data.get("gpus") or 0))
                )
                cell.micro_batch = data.get("micro_batch", data.get("max_tokens", cell.micro_batch))
            case "finished":
                cell.status, cell.cause = "finished", None
            case "stopped" | "paused":
                cell.status, cell.cause = event.kind, data.get("because")
            case "failed":
                cell.status, cell.cause = ("failed" if data.get("final") else "waiting"), data.get("cause")
                cell.failures += 1
            case "retried":
                cell.status, cell.cause = "waiting", data.get("because")
                cell.micro_batch = data.get("micro_batch", data.get("max_tokens", cell.micro_batch))
            case "exploited":
                cell.lineage.append({key: value for key, value in data.items() if key != "cell"} | {"at": event.at})
        if event.kind in ("finished", "stopped", "paused", "failed"):
            cell.figures = data.get("figures") or cell.figures
            if cell.stretches and cell.stretches[-1].end is None:
                cell.stretches[-1].end = event.at
    return found
