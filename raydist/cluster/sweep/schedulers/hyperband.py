"""Hyperband (Li et al. 2018), asynchronous: brackets of asha, from the one that halves most to the one that halves no cell.

Runs anywhere. Pure.

Which values are good early may not be so late: so a share of the cells is judged at later rungs only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from raydist.cluster.sweep.schedulers import Decision, Rule
from raydist.cluster.sweep.schedulers.asha import Asha
from raydist.spec.sweep.space import uniform


class Hyperband(Rule):
    """`rungs`, `reduction`: see `Asha`. Bracket n has all rungs but the first n.

    A bracket with k rungs has reduction^k / (k + 1) of all cells (algorithm 1 of the paper), and a cell belongs to it by its id:
    the same one for every driver.
    """

    name = "hyperband"

    def __init__(self, rungs: Sequence[int], reduction: float) -> None:
        self._brackets = [Asha(rungs[n:], reduction) for n in range(len(rungs) + 1)]
        # Divided by the largest, which a float may not hold where a file has hundreds of rungs.
        weights = [reduction ** -float(n) / (len(rungs) - n + 1) for n in range(len(rungs) + 1)]
        self._bounds = [bound / sum(weights) for bound in accumulate(weights)]

    def bracket(self, cell: str) -> int:
        """Which one the cell belongs to, from 0."""
        return min(bisect_right(self._bounds, uniform(0, 0, cell)), len(self._brackets) - 1)

    def report(self, cell: str, tokens: int, score: float) -> Decision:
        """Judged among the cells of its bracket."""
        return self._brackets[self.bracket(cell)].report(cell, tokens, score)

    def over(self, cell: str) -> None:
        """Its scores stay in its bracket."""
        self._brackets[self.bracket(cell)].over(cell)
