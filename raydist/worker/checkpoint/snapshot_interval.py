"""How often a copy of the state in memory is taken: every so many steps, or as often as costs a given share of the time.

Runs in: each train worker, on rank 0, which decides for all. Pure: no clock, no torch.

A copy costs what the steps beside it take longer than the calm ones: where the loop stood for it, and what it took of the
processors, the memory and the network until it was committed, and the buddy had it. One such difference is as noisy as a step. So
at first a copy is believed to cost the processor time that it took, which is right where ranks fill all cores; several differences
overrule that.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Literal

SHARE = 0.01
"""Of the time of all steps: what copies may cost where `every` is auto."""
AIM = 0.8
"""Of that share: a copy was measured to cost up to 1.2 of what it is believed to (benchmarks/snapshot.py)."""
_CALM, _COSTS = 50, 32
_BELIEF = 4
"""As many differences as the processor time counts for."""
_BETWEEN = 3
"""Calm steps before a copy, at least: they are what its cost is measured against."""


class Pace:
    """`step`, then `due`, once a step, in that order; `taken`, where a copy begins; `ended`, where it does.

    `every`: steps, or auto. `newest`: the step of the newest copy or checkpoint that is there, or 0.
    """

    def __init__(self, every: int | Literal["auto"], newest: int = 0) -> None:
        self._every, self._newest = every, newest
        self._calm: deque[float] = deque(maxlen=_CALM)
        self._costs: deque[float] = deque(maxlen=_COSTS)
        self._cpu: deque[float] = deque(maxlen=_COSTS)
        self._between = 0
        self._beside: list[float] | None = None
        self._spoilt = False
        self._failures = self._copies = 0

    @property
    def cost(self) -> float | None:
        """Seconds that a copy costs; None until it is known."""
        if not self._cpu:
            return None
        return max(0.0, statistics.median([*self._costs, *[statistics.median(self._cpu)] * _BELIEF]))

    @property
    def base(self) -> float | None:
        """Seconds of a calm step; None until it is known."""
        return statistics.median(self._calm) if len(self._calm) >= _BETWEEN else None

    @property
    def interval(self) -> int | None:
        """Steps from one copy to the next; None until it is known."""
        if self._every != "auto":
            return self._every
        cost, base = self.cost, self.base
        if cost is None or base is None:
            return None
        return max(1, math.ceil(cost / (AIM * SHARE * base)))

    def step(self, seconds: float, unusual: bool) -> None:
        """A step took so long, all in all. `unusual`: it had something beside it that most have not, such as a checkpoint."""
        if self._beside is not None:
            self._beside.append(seconds)
            self._spoilt |= unusual
        elif not unusual:
            self._calm.append(seconds)
            self._between += 1

    def due(self, step: int) -> bool:
        """Whether a copy should be taken after `step`."""
        if self._beside is not None:
            return False
        wait = (self.interval or 1) * 2 ** min(self._failures, 6)
        return step - self._newest >= wait and (self._every != "auto" or self._between >= _BETWEEN)

    def taken(self, step: int, checkpoint: bool = False) -> None:
        """A copy of the state after `step` begins; or a checkpoint, which serves as well."""
        self._newest = step
        if not checkpoint:
            self._beside, self._spoilt = [], False

    def ended(self, committed: bool, cpu_seconds: float) -> None:
        """The copy is there and sent, or has failed; the step before was the last beside it. `cpu_seconds`: of processor time."""
        assert self._beside is not None, "taken() comes first"
        beside, self._beside, self._between = self._beside, None, 0
        self._failures = 0 if committed else self._failures + 1
        base = self.base
        if not committed:
            return
        self._copies += 1
        if self._copies == 2:
            self._cpu.clear()  # the first copy touched memory and connections for the first time
        self._cpu.append(cpu_seconds)
        if self._copies > 1 and not self._spoilt and base is not None:
            self._costs.append(sum(beside) - base * len(beside))
