"""Asynchronous successive halving (Li et al. 2020): at each rung the best 1/reduction go on, and no cell waits for another.

Runs anywhere. Pure.

A cell is compared with those that were at the rung before it, so the first ones go on whatever they are: what Ray Tune's
AsyncHyperBandScheduler decides, with rungs in tokens.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from raydist.cluster.sweep.schedulers import GO, STOP, Decision, Rule
from raydist.cluster.sweep.schedulers._sorted import Ordered


class Asha(Rule):
    """`rungs`: tokens, ascending; without any, no cell stops. `reduction`: one in so many goes on."""

    name = "asha"

    def __init__(self, rungs: Sequence[int], reduction: float) -> None:
        self._tokens = list(rungs)
        self._rungs = [Ordered() for _ in rungs]
        self._stopping = 1 - 1 / reduction
        self._passed: dict[str, int] = {}
        """Cell -> how many rungs are behind it."""

    def report(self, cell: str, tokens: int, score: float) -> Decision:
        """Judged at the highest rung that it has come to, once. One that it passed between two reports has none of its scores."""
        passed = bisect_right(self._tokens, tokens)
        if passed <= self._passed.get(cell, 0):
            return GO
        self._passed[cell] = passed
        rung = self._rungs[passed - 1]
        worse = len(rung) > 0 and score < rung.quantile(self._stopping)
        if math.isfinite(score):  # else every later one would look good beside it
            rung.add(score)
        return STOP if worse else GO

    def over(self, cell: str) -> None:
        """Its scores stay on their rungs."""
        self._passed.pop(cell, None)
