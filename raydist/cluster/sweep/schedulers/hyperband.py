"""Asynchronous Hyperband (Li et al. 2018): brackets of asha, from the one with all rungs to the one with none.

Runs anywhere. Pure.

Values that are bad early may be good late, so a part of the trials is judged at later rungs only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from pydantic import Field

from raydist.cluster.sweep.schedulers import Decision, Rule, Setting
from raydist.cluster.sweep.schedulers.asha import Asha
from raydist.spec.sweep.rungs import RungOptions
from raydist.spec.sweep.space import uniform


class Options(RungOptions):
    """asha in brackets, of which one stops no cell."""

    reduction: float = Field(3.0, gt=1, description="one in so many continues.")


def build(settings: Mapping[str, Any], setting: Setting) -> Rule:
    """See the contract in `__init__`."""
    options = Options(**settings)
    return Hyperband(options.rungs_of(setting.tokens), options.reduction)


class Hyperband(Rule):
    """`rungs`, `reduction`: see `Asha`. Bracket n has all rungs but the first n.

    The share of a bracket with k rungs is proportional to reduction^k / (k + 1) (algorithm 1 of the paper). A trial's id
    determines its bracket, so it is the same for every driver.
    """

    def __init__(self, rungs: Sequence[int], reduction: float) -> None:
        self._brackets = [Asha(rungs[n:], reduction) for n in range(len(rungs) + 1)]
        # Divided by the largest weight, which could overflow a float with hundreds of rungs.
        weights = [reduction ** -float(n) / (len(rungs) - n + 1) for n in range(len(rungs) + 1)]
        self._bounds = [bound / sum(weights) for bound in accumulate(weights)]

    def bracket(self, trial: str) -> int:
        """The trial's bracket, from 0."""
        return min(bisect_right(self._bounds, uniform(0, 0, trial)), len(self._brackets) - 1)

    def report(self, trial: str, tokens: int, score: float) -> Decision:
        """Judges it among the trials of its bracket."""
        return self._brackets[self.bracket(trial)].report(trial, tokens, score)

    def over(self, trial: str) -> None:
        """Keeps its scores in the bracket."""
        self._brackets[self.bracket(trial)].over(trial)
