"""Population based training (Jaderberg et al. 2017): a bad trial copies a good one, and perturbs its values.

Runs anywhere. Pure: random numbers are a function of the sweep's seed, the trial's id, and how many copies it has made.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from raydist.cluster.sweep.schedulers import GO, TURN, Copy, Decision, Rule, Setting
from raydist.spec.parts import Factor, Part, Tokens
from raydist.spec.sweep import Axis
from raydist.spec.sweep.space import DIGITS, uniform

COPIES = True


class Options(Part):
    """the worst cells continue from the best ones' checkpoints, with their values perturbed."""

    every: Tokens | None = Field(None, description="tokens between two decisions; null: a tenth of a cell's.")
    quantile: float = Field(
        0.25, gt=0, le=0.5, description="the share that is worst, and the share that is best and copied from."
    )
    perturb: tuple[Factor, Factor] = Field(
        (0.8, 1.25),
        description="a copied number is multiplied with one of these; of a list it goes to a neighbour.",
    )
    resample: float = Field(
        0.25, ge=0, le=1, description="how likely a value is drawn again instead of being perturbed."
    )


def build(settings: Mapping[str, Any], setting: Setting) -> Rule:
    """See the contract in `__init__`."""
    options = Options(**settings)
    return Population(
        setting.axes,
        setting.values,
        every=options.every or max(1, setting.tokens // 10),
        quantile=options.quantile,
        resample=options.resample,
        perturb=options.perturb,
        seed=setting.seed,
    )


@dataclass(slots=True)
class _Member:
    """A trial. `interval`: the last one in which it was judged; `score`: its score then; `moved`: it has copied since."""

    interval: int = 0
    score: float | None = None
    moved: bool = False
    copies: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    """Values taken from other trials."""


class Population(Rule):
    """Judges a trial once per `every` tokens, by its rank among the last scores of all running trials.

    `values(trial)`: its own values, field -> value. `quantile`: the share of the worst, and of the best; `resample`: probability
    that a value is drawn again from its axis; `perturb`: otherwise a number is multiplied by one of these two factors.
    """

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
        """Scores and trials, the worst first."""

    def report(self, trial: str, tokens: int, score: float) -> Decision:
        """Turn at the first report of an interval, or Copy if the trial is one of the worst then; else Go."""
        member = self._members.setdefault(trial, _Member())
        if tokens // self._every <= member.interval:
            return GO
        member.interval = tokens // self._every
        self._unrank(trial, member)
        member.score, member.moved = score, False
        insort(self._ranking, (score, trial))
        source = self._source(trial, member, score)
        return TURN if source is None else Copy(source, self._explored(trial, member, source))

    def copied(self, trial: str, tokens: int, changes: Mapping[str, Sequence[Any]]) -> None:
        """It is judged again in the next interval. Until then it keeps its rank, and no other trial copies it."""
        member = self._members.setdefault(trial, _Member())
        member.interval, member.copies, member.moved = tokens // self._every, member.copies + 1, True
        member.values |= {name: after for name, (_, after) in changes.items()}

    def over(self, trial: str) -> None:
        """Removes it from the ranking: a trial that has ended is not copied."""
        if (member := self._members.pop(trial, None)) is not None:
            self._unrank(trial, member)

    def _unrank(self, trial: str, member: _Member) -> None:
        if member.score is not None:
            del self._ranking[bisect_left(self._ranking, (member.score, trial))]

    def _source(self, trial: str, member: _Member, score: float) -> str | None:
        """The trial to copy; None if this one is not among the worst, or the chosen source is not better."""
        count = len(self._ranking)
        share = min(math.ceil(count * self._quantile), count // 2)
        if bisect_left(self._ranking, (score, trial)) >= share:
            return None
        best, source = self._ranking[count - share + int(self._draw(trial, member, "source") * share)]
        return source if best > score and not self._members[source].moved else None

    def _explored(self, trial: str, member: _Member, source: str) -> dict[str, list[Any]]:
        """Field -> [current value, new value]: the new one is the source's, perturbed within the axis."""
        mine, theirs = self._values(trial), self._values(source)
        changes = {}
        for axis in self._axes:
            chance, where = (self._draw(trial, member, f"{axis.field} {what}") for what in ("resample", "value"))
            value = theirs.get(axis.field)
            # No value to perturb: a trial of a `list` may take it from the base, or the file's list has changed.
            missing = axis.field not in theirs or (axis.kind == "values" and value not in axis.values)
            resampled = missing or chance < self._resample
            after = axis.at(where) if resampled else self._perturbed(axis, value, int(where * 2))
            changes[axis.field] = [mine.get(axis.field), after]
        return changes

    def _perturbed(self, axis: Axis, value: Any, which: int) -> Any:
        if axis.kind == "values":
            place = axis.values.index(value) + (-1, 1)[which]
            return axis.values[min(max(place, 0), len(axis.values) - 1)]
        factor = self._perturb[which]
        found = value * factor
        if axis.kind == "int_uniform":
            # By at least one, or small numbers would never change.
            found = round(found) if round(found) != value else value + (factor > 1) - (factor < 1)
            return int(min(max(found, axis.low), axis.high))
        return min(max(float(f"{found:.{DIGITS}g}"), axis.low), axis.high)

    def _values(self, trial: str) -> dict[str, Any]:
        member = self._members.get(trial)
        return {**self._own(trial), **(member.values if member else {})}

    def _draw(self, trial: str, member: _Member, what: str) -> float:
        return uniform(self._seed, member.copies, f"pbt {trial} {what}")
