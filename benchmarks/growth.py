"""How fast the processes of a run grow, when faults start them anew: used by soak.py.

A process counts from its own start: its first WARM_UP minutes are left out, in which its allocators fill. Then two rates are taken:

- `growth`, inside of processes: the slope between any two samples of one process that are APART or more; the median over all such
  pairs of all processes of a role that were observed for LEAST minutes. In less, what a process takes once and keeps looks like
  growth: the end of glibc's heap is in pages of 2 MiB, and a rank takes 2 to 10 MiB at once in its first five minutes.
- `inherited`, from one process to the next: what a process has at the same AGE, against the time at which it was started; the
  median of the slopes between any two processes. It shows what each start takes over from the one before. With fewer than STARTS
  processes there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

WARM_UP = 2.0
APART = 0.5
LEAST = 8.0
AGE = 1.0, 1.5
STARTS = 4


class Sample(NamedTuple):
    """Of one process; `age` in minutes since its start."""

    age: float
    memory_mib: float
    descriptors: float
    threads: float


@dataclass(slots=True)
class Life:
    """One process. `started`: minute of the run."""

    role: str
    started: float
    samples: list[Sample] = field(default_factory=list)

    def after(self, age: float) -> np.ndarray:
        """The samples from that age on, one a row."""
        return np.array([sample for sample in self.samples if sample.age >= age]).reshape(-1, len(Sample._fields))


def growth(lives: Iterable[Life], what: str) -> float | None:
    """By minute, inside of processes; None if none was observed for long enough. `what`: a field of Sample."""
    column, slopes = Sample._fields.index(what), [np.empty(0)]
    for life in lives:
        table = life.after(WARM_UP)
        if len(table) and table[-1, 0] - table[0, 0] >= LEAST:
            i, j = np.triu_indices(len(table), 1)
            apart = table[j, 0] - table[i, 0]
            far = apart >= APART
            slopes.append((table[j, column] - table[i, column])[far] / apart[far])
    found = np.concatenate(slopes)
    return float(np.median(found)) if len(found) else None


def inherited(lives: Iterable[Life], what: str) -> float | None:
    """By minute, from one process to the next at the same age; None if there were few."""
    column, low, high = Sample._fields.index(what), *AGE
    points = []
    for life in lives:
        values = [sample[column] for sample in life.samples if low <= sample.age < high]
        if values:
            points.append((life.started, float(np.median(values))))
    started, values_there = np.array(points).reshape(-1, 2).T
    i, j = np.triu_indices(len(points), 1)
    apart = started[j] - started[i]
    far = np.abs(apart) >= APART  # ranks of one attempt start together
    if len(np.unique(np.round(started / APART))) < STARTS:
        return None
    return float(np.median((values_there[j] - values_there[i])[far] / apart[far]))


def rates(lives: Sequence[Life]) -> dict[str, float | int | None]:
    """Of the processes of one role: how many, the first and the last values after their warm-up, and both rates of each field."""
    seen = [life for life in lives if len(life.after(WARM_UP))]
    found: dict[str, float | int | None] = {"processes": len(lives), "past_warm_up": len(seen)}
    for column, what in enumerate(Sample._fields[1:], 1):
        found |= {
            f"{what}_first": float(np.median([life.after(WARM_UP)[0, column] for life in seen])) if seen else None,
            f"{what}_last": float(np.median([life.after(WARM_UP)[-1, column] for life in seen])) if seen else None,
            f"{what}_a_minute": growth(lives, what),
            f"{what}_inherited_a_minute": inherited(lives, what),
        }
    return found
