"""The median rule (Golovin et al. 2017): a cell whose best is worse than the median of the others' means so far stops.

Runs anywhere. Pure.

What Ray Tune's MedianStoppingRule decides, but for two things: no cell is paused to let others catch up, and cells are looked at in
step, every so many tokens. So the others' means at a look are there already, in order, when a cell comes to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from raydist.cluster.sweep.schedulers import GO, STOP, Decision, Rule
from raydist.cluster.sweep.schedulers._sorted import Ordered

MOST_LOOKS = 100
"""At a cell: a report that passes many looks is one of each of them."""
_LEAST_OTHERS = 3
"""Fewer have no median worth stopping for."""


@dataclass(slots=True)
class _Seen:
    """A cell, up to its last look. `total`, `count`: of its scores since `grace`."""

    look: int = 0
    best: float = -math.inf
    total: float = 0.0
    count: int = 0

    def mean(self) -> float | None:
        """None where there is none to compare with."""
        return self.total / self.count if self.count and math.isfinite(self.total) else None


class Median(Rule):
    """Looks at a cell every `every` tokens, at most `MOST_LOOKS` times in `tokens`. Before `grace` it stops none, and no score
    counts in a mean.
    """

    name = "median"

    def __init__(self, every: int, grace: int, tokens: int) -> None:
        self._every, self._grace = max(every, tokens // MOST_LOOKS), grace
        self._looks: dict[int, Ordered] = {}
        """Look -> means of all cells that have come to it or further, each as it was then."""
        self._cells: dict[str, _Seen] = {}

    def report(self, cell: str, tokens: int, score: float) -> Decision:
        """Looked at once in `every` tokens."""
        look = tokens // self._every
        seen = self._cells.get(cell)
        if look <= (seen.look if seen else 0):
            return GO
        if seen is None:
            seen = self._cells[cell] = _Seen()
        for missed in range(seen.look + 1, look):
            self._note(missed, seen)
        seen.look, seen.best = look, max(seen.best, score)
        if tokens < self._grace:
            return GO
        seen.total, seen.count = seen.total + score, seen.count + 1
        others = self._looks.get(look)
        worse = others is not None and len(others) >= _LEAST_OTHERS and seen.best < others.quantile(0.5)
        self._note(look, seen)
        return STOP if worse else GO

    def over(self, cell: str) -> None:
        """Its means stay at the looks that it came to."""
        self._cells.pop(cell, None)

    def _note(self, look: int, seen: _Seen) -> None:
        if (mean := seen.mean()) is not None:
            self._looks.setdefault(look, Ordered()).add(mean)
