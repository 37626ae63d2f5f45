"""How often a snapshot in memory is taken: every so many steps, or as often as costs a given share of the time.

Runs in: each train worker, on rank 0, which decides for all. Pure: no clock, no torch.

A snapshot costs the time by which the steps during it are longer than the other ones: the loop waits for the copy, and the copy
takes processors, memory and network until it is committed and on the buddy. One such difference is as noisy as a step. So the first
estimate is the processor time of the snapshot, which is right if ranks use all cores; several differences outweigh it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Literal

SHARE = 0.01
"""Of the time of all steps: the allowed cost of snapshots if `every` is auto."""
AIM = 0.8
"""Of that share: a snapshot was measured to cost up to 1.2 of the estimate (benchmarks/snapshot.py)."""
_STEPS, _COSTS = 50, 32
_PRIOR = 4
"""The processor time weighs as much as this many differences."""
_BETWEEN = 3
"""Steps without a snapshot before each one, at least: its cost is measured against them."""


def steps_apart(cost_s: float, step_s: float) -> int:
    """Steps from one snapshot to the next if `every` is auto."""
    return max(1, math.ceil(cost_s / (AIM * SHARE * step_s)))


class SnapshotInterval:
    """Call `step`, then `due`, once a step; `taken` when a snapshot begins; `ended` when it ends.

    `every`: steps, or auto. `newest`: the step of the newest snapshot or checkpoint, or 0.
    """

    def __init__(self, every: int | Literal["auto"], newest: int = 0) -> None:
        self._every, self._newest = every, newest
        self._plain_steps: deque[float] = deque(maxlen=_STEPS)
        self._costs: deque[float] = deque(maxlen=_COSTS)
        self._cpu: deque[float] = deque(maxlen=_COSTS)
        self._between = 0
        self._during: list[float] | None = None
        self._unusual = False
        self._failures = self._copies = 0

    @property
    def cost(self) -> float | None:
        """Seconds that a snapshot costs; None until it is known."""
        if not self._cpu:
            return None
        return max(0.0, statistics.median([*self._costs, *[statistics.median(self._cpu)] * _PRIOR]))

    @property
    def base(self) -> float | None:
        """Seconds of a step without a snapshot; None until it is known."""
        return statistics.median(self._plain_steps) if len(self._plain_steps) >= _BETWEEN else None

    @property
    def interval(self) -> int | None:
        """Steps from one snapshot to the next; None until it is known."""
        if self._every != "auto":
            return self._every
        cost, base = self.cost, self.base
        if cost is None or base is None:
            return None
        return steps_apart(cost, base)

    def step(self, seconds: float, unusual: bool) -> None:
        """A step took so many seconds in all. `unusual`: it had other work than most steps, such as a checkpoint."""
        if self._during is not None:
            self._during.append(seconds)
            self._unusual |= unusual
        elif not unusual:
            self._plain_steps.append(seconds)
            self._between += 1

    def due(self, step: int) -> bool:
        """Whether a snapshot should be taken after `step`."""
        if self._during is not None:
            return False
        wait = (self.interval or 1) * 2 ** min(self._failures, 6)
        return step - self._newest >= wait and (self._every != "auto" or self._between >= _BETWEEN)

    def taken(self, step: int, checkpoint: bool = False) -> None:
        """A snapshot of the state after `step` begins; or a checkpoint, which replaces it."""
        self._newest = step
        if not checkpoint:
            self._during, self._unusual = [], False

    def ended(self, committed: bool, cpu_seconds: float) -> None:
        """The snapshot is committed and sent, or has failed; the previous step was the last during it. `cpu_seconds`: processor
        time.
        """
        assert self._during is not None, "taken() comes first"
        during, self._during, self._between = self._during, None, 0
        self._failures = 0 if committed else self._failures + 1
        base = self.base
        if not committed:
            return
        self._copies += 1
        if self._copies == 2:
            self._cpu.clear()  # the first snapshot allocated memory and opened connections
        self._cpu.append(cpu_seconds)
        if self._copies > 1 and not self._unusual and base is not None:
            self._costs.append(sum(during) - base * len(during))
