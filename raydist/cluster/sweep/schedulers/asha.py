"""Asynchronous successive halving (Li et al. 2020): at each rung the best 1/reduction continue; no trial waits for another.

Runs anywhere. Pure.

A trial is compared with those that reached the rung earlier, so the first ones always continue. Same decisions as Ray Tune's
AsyncHyperBandScheduler, with rungs in tokens.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from raydist.cluster.sweep.schedulers import GO, STOP, Decision, Rule, Setting
from raydist.cluster.sweep.schedulers._sorted import Ordered
from raydist.spec.sweep.rungs import RungOptions


class Options(RungOptions):
    """at each rung the best 1/reduction continue."""

    reduction: float = Field(4.0, gt=1, description="one in so many continues.")


def build(settings: Mapping[str, Any], setting: Setting) -> Rule:
    """See the contract in `__init__`."""
    options = Options(**settings)
    return Asha(options.rungs_of(setting.tokens), options.reduction)


class Asha(Rule):
    """`rungs`: tokens, ascending; if empty, no trial stops. `reduction`: 1/reduction of the trials continue at each rung."""

    def __init__(self, rungs: Sequence[int], reduction: float) -> None:
        self._tokens = list(rungs)
        self._rungs = [Ordered() for _ in rungs]
        self._stopping = 1 - 1 / reduction
        self._passed: dict[str, int] = {}
        """Trial -> number of rungs that it has passed."""

    def report(self, trial: str, tokens: int, score: float) -> Decision:
        """Judges once, at the highest rung reached. A lower rung that the trial skipped between two reports gets no score of it."""
        passed = bisect_right(self._tokens, tokens)
        if passed <= self._passed.get(trial, 0):
            return GO
        self._passed[trial] = passed
        rung = self._rungs[passed - 1]
        worse = len(rung) > 0 and score < rung.quantile(self._stopping)
        if math.isfinite(score):  # an infinite score would shift the quantile for all later trials
            rung.add(score)
        return STOP if worse else GO

    def over(self, trial: str) -> None:
        """Keeps its scores on the rungs."""
        self._passed.pop(trial, None)
