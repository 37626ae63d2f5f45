"""How far apart checkpoints are that lose the least time: Young's and Daly's formula, and `checkpoint.every: auto`.

Runs anywhere. Pure: no clock, no torch. Rank 0 decides, and sends its decision to all.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Literal

FIRST = 10
"""Steps before the first checkpoint of an attempt if `every` is auto; doubled until a save's cost is known."""
_WRITES = 1.5
"""Checkpoints are at least this many times as far apart as it takes to write one."""
_STEPS, _SAVES = 50, 8


def young_daly(save_s: float, mtbf_s: float) -> float:
    """The seconds between two checkpoints that lose the least time, where each stops training for `save_s` and a failure comes
    every `mtbf_s`: Young (1974), with Daly's terms (2006) for intervals that are not short against the latter."""
    if save_s >= mtbf_s / 2:
        return mtbf_s
    root = math.sqrt(2 * save_s * mtbf_s)
    return root * (1 + math.sqrt(save_s / (2 * mtbf_s)) / 3 + save_s / (18 * mtbf_s)) - save_s


def apart(stall_s: float, write_s: float, mtbf_s: float) -> float:
    """Seconds between two checkpoints if `every` is auto. `stall_s`: training stops for it; `write_s`: until the commit."""
    return max(young_daly(stall_s, mtbf_s), _WRITES * write_s)


class CheckpointInterval:
    """When checkpoints are due: every so many steps; auto: at `next`; None: only at the end. `resumed`: the step that the attempt
    continues from. `mtbf_s`: mean seconds between two failures of the run.
    """

    def __init__(self, every: int | Literal["auto"] | None, resumed: int, mtbf_s: float) -> None:
        self.every, self._mtbf_s, self._resumed = every, mtbf_s, resumed
        self.next = resumed + FIRST
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._stalls: deque[float] = deque(maxlen=_SAVES)
        self._writes: deque[float] = deque(maxlen=_SAVES)

    def due(self, step: int, ending: bool) -> bool:
        """Whether a checkpoint is saved after `step`. All ranks, the same answer."""
        if ending or self.every is None:
            return ending
        return step >= self.next if self.every == "auto" else step % self.every == 0

    def stepped(self, seconds: float, unusual: bool) -> None:
        """A step took so many seconds. `unusual`: it had other work than most."""
        if not unusual:
            self._steps.append(seconds)

    def saved(self, seconds: float, stall_s: float) -> None:
        """A checkpoint was committed after so many seconds; for `stall_s` of them training waited."""
        self._writes.append(seconds)
        self._stalls.append(stall_s)

    def after(self, step: int) -> int:
        """The step of the next checkpoint, when one begins at `step`: rank 0's decision."""
        if not self._stalls or not self._steps:
            return step + max(step - self._resumed, FIRST)
        seconds = apart(statistics.median(self._stalls), statistics.median(self._writes), self._mtbf_s)
        return step + max(1, math.ceil(seconds / statistics.median(self._steps)))
