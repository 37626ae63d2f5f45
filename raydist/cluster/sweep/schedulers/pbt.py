"""Population based training (Jaderberg et al. 2017): one of the worst goes on as one of the best, its values a little different.

Runs anywhere. Pure: what is drawn is a function of the sweep's seed, the cell, and how many copies it has made.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raydist.cluster.sweep.schedulers import GO, TURN, Copy, Decision, Rule
from raydist.spec.sweep import Axis
from raydist.spec.sweep.space import DIGITS, uniform


@dataclass(slots=True)
class _Member:
    """A cell of the population. `interval`: the last one that it was judged in; `score`: then. `moved`: it has copied since."""

    interval: int = 0
    score: float | None = None
    moved: bool = False
    copies: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    """Those that it has from others."""


class Population(Rule):
    """Judges a cell once in `every` tokens, among all that train by what each of them said when it was judged last.

    `values(cell)`: the cell's own, field -> value. `quantile`: the share that is worst, and the share that is best; `resample`: how
    likely a value is drawn anew from its axis; `perturb`: what else a number is multiplied with, one of the two.
    """

    name = "pbt"

    def __init__(
        self,
        axes: Sequence[Axis],
        values: Callable[[str], Mapping[str, Any]],
        *,
        every: int,
        quantile: float,
        resample: float,
        perturb: tuple[float, float],
        seed: int,
    ) -> None:
        self._axes, self._own = [axis for axis in axes if not axis.fixed], values
        self._every, self._quantile, self._resample, self._perturb = every, quantile, resample, perturb
        self._seed = seed
        self._members: dict[str, _Member] = {}
        self._ranking: list[tuple[float, str]] = []
        """Scores and cells, the worst first."""

    def report(self, cell: str, tokens: int, score: float) -> Decision:
        """Turn in the first report of an interval, Copy if the cell is one of the worst then."""
        member = self._members.setdefault(cell, _Member())
        if tokens // self._every <= member.interval:
            return GO
        member.interval = tokens // self._every
        self._unrank(cell, member)
        member.score, member.moved = score, False
        insort(self._ranking, (score, cell))
        source = self._source(cell, member, score)
        return TURN if source is None else Copy(source, self._explored(cell, member, source))

    def copied(self, cell: str, tokens: int, changes: Mapping[str, Sequence[Any]]) -> None:
        """Judged again in the next interval. Until then it keeps its place, lest others were the worst, but nobody copies it."""
        member = self._members.setdefault(cell, _Member())
        member.interval, member.copies, member.moved = tokens // self._every, member.copies + 1, True
        member.values |= {name: after for name, (_, after) in changes.items()}

    def over(self, cell: str) -> None:
        """Nobody copies a cell that has ended."""
        if (member := self._members.pop(cell, None)) is not None:
            self._unrank(cell, member)

    def _unrank(self, cell: str, member: _Member) -> None:
        if member.score is not None:
            del self._ranking[bisect_left(self._ranking, (member.score, cell))]

    def _source(self, cell: str, member: _Member, score: float) -> str | None:
        """Whom the cell is to copy; None if it is not one of the worst, or nobody is better."""
        count = len(self._ranking)
        share = min(math.ceil(count * self._quantile), count // 2)
        if bisect_left(self._ranking, (score, cell)) >= share:
            return None
        best, source = self._ranking[count - share + int(self._draw(cell, member, "source") * share)]
        return source if best > score and not self._members[source].moved else None

    def _explored(self, cell: str, member: _Member, source: str) -> dict[str, list[Any]]:
        """Field -> the cell's value, and the one that it is to have: the source's, perturbed inside of what the file has."""
        mine, theirs = self._values(cell), self._values(source)
        changes = {}
        for axis in self._axes:
            chance, where = (self._draw(cell, member, f"{axis.field} {what}") for what in ("resample", "value"))
            value = theirs.get(axis.field)
            # A cell of a `list` may leave a value to the base, and a list may have lost one since: nothing to perturb.
            lost = axis.field not in theirs or (axis.kind == "values" and value not in axis.values)
            anew = lost or chance < self._resample
            after = axis.at(where) if anew else self._perturbed(axis, value, int(where * 2))
            changes[axis.field] = [mine.get(axis.field), after]
        return changes

    def _perturbed(self, axis: Axis, value: Any, which: int) -> Any:
        if axis.kind == "values":
            place = axis.values.index(value) + (-1, 1)[which]
            return axis.values[min(max(place, 0), len(axis.values) - 1)]
        factor = self._perturb[which]
        found = value * factor
        if axis.kind == "int_uniform":
            # By one at least, or small numbers would never move.
            found = round(found) if round(found) != value else value + (factor > 1) - (factor < 1)
            return int(min(max(found, axis.low), axis.high))
        return min(max(float(f"{found:.{DIGITS}g}"), axis.low), axis.high)

    def _values(self, cell: str) -> dict[str, Any]:
        member = self._members.get(cell)
        return {**self._own(cell), **(member.values if member else {})}

    def _draw(self, cell: str, member: _Member, what: str) -> float:
        return uniform(self._seed, member.copies, f"pbt {cell} {what}")
