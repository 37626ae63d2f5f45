"""Hours and GPU-hours that a sweep has spent, over all its drivers, and whether a limit is reached.

Runs anywhere. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from raydist.records import Event
from raydist.report.sweep.standing import Spent
from raydist.spec.sweep.models import LimitsSpec

HOUR = 3600.0
_OVER = ("finished", "stopped", "paused", "failed")


def before(events: Iterable[Event]) -> Spent:
    """Spent by earlier drivers. A driver that was killed, with its trials, counts until its last event."""
    spent, last, driving = Spent(), 0.0, False
    training: dict[str, tuple[float, float]] = {}
    """Trial -> its GPUs and workers."""
    for event in events:
        if event.kind == "began":
            driving, training = True, {}
        elif driving:
            hours = (event.at - last) / HOUR
            gpus, workers = (sum(column) for column in zip((0.0, 0.0), *training.values(), strict=True))
            spent += Spent(hours, hours * gpus, hours * workers)
        last, trial = event.at, str(event.data.get("cell"))
        if event.kind == "started":
            training[trial] = float(event.data.get("gpus", 0)), float(event.data.get("workers", 1))
        elif event.kind in _OVER:
            training.pop(trial, None)
        elif event.kind == "ended":
            driving = False
    return spent


def reached(limits: LimitsSpec, spent: Spent) -> str | None:
    """The limit that is reached, as text; None if none is."""
    if limits.hours is not None and spent.hours >= limits.hours:
        return f"limits.hours is {limits.hours:g}"
    if limits.gpu_hours is not None and spent.gpu_hours >= limits.gpu_hours:
        return f"limits.gpu_hours is {limits.gpu_hours:g}"
    return None
