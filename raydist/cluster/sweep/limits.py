"""What a sweep has spent, over all its drivers, and whether that is enough.

Runs anywhere. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from raydist.records import Event
from raydist.spec.sweep.models import LimitsSpec
from raydist.sweepstate import CellState

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Spent:
    """Hours on the wall while a driver ran; GPU-hours and worker-hours while cells had workers."""

    hours: float = 0.0
    gpu_hours: float = 0.0
    worker_hours: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        """Both together."""
        return Spent(self.hours + other.hours, self.gpu_hours + other.gpu_hours, self.worker_hours + other.worker_hours)


def before(events: Iterable[Event], states: Mapping[str, CellState]) -> Spent:
    """What drivers before this one have spent. One that was killed counts until the last thing it wrote."""
    hours, began, last = 0.0, None, 0.0
    for event in events:
        if event.kind == "began":
            hours += (last - began) / HOUR if began is not None else 0.0
            began = event.at
        last = event.at
    hours += (last - began) / HOUR if began is not None else 0.0
    stretches = [
        (s, (last if s.end is None else s.end) - s.start) for state in states.values() for s in state.stretches
    ]
    return Spent(
        hours,
        sum(stretch.gpus * seconds for stretch, seconds in stretches) / HOUR,
        sum(stretch.workers * seconds for stretch, seconds in stretches) / HOUR,
    )


def reached(limits: LimitsSpec, spent: Spent) -> str | None:
    """The limit that is reached, in words; None if there is none."""
    if limits.hours is not None and spent.hours >= limits.hours:
        return f"limits.hours is {limits.hours:g}"
    if limits.gpu_hours is not None and spent.gpu_hours >= limits.gpu_hours:
        return f"limits.gpu_hours is {limits.gpu_hours:g}"
    return None
