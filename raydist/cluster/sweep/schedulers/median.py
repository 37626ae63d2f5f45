"""The median rule (Golovin et al. 2017): stops a trial whose best score is below the median of the others' running means.

Runs anywhere. Pure.

Like Ray Tune's MedianStoppingRule, with two differences: no trial is paused to let others catch up, and all trials are checked at
the same token counts. So the means of earlier trials at a check are already known, and sorted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from raydist.cluster.sweep.schedulers import GO, STOP, Decision, Rule, Setting
from raydist.cluster.sweep.schedulers._sorted import Ordered
from raydist.spec.parts import Part, Tokens

MOST_LOOKS = 100
"""Maximum number of checks of a trial. A report that passes several checks counts for each of them."""
_LEAST_OTHERS = 3
"""With fewer other trials no trial is stopped."""


class Options(Part):
    """a cell that is worse than the median of the others stops."""

    grace: Tokens | None = Field(None, description="tokens before which nothing is stopped; null: a fifth of a cell's.")
    every: Tokens | None = Field(None, description="tokens between two decisions; null: a tenth of a cell's.")

    def grace_of(self, tokens: int) -> int:
        """Tokens before which nothing is stopped in a cell of so many."""
        return self.grace or tokens // 5

    def every_of(self, tokens: int) -> int:
        """Tokens between two decisions in a cell of so many."""
        return self.every or max(1, tokens // 10)


def build(settings: Mapping[str, Any], setting: Setting) -> Rule:
    """See the contract in `__init__`."""
    options = Options(**settings)
    return Median(options.every_of(setting.tokens), options.grace_of(setting.tokens), setting.tokens)


@dataclass(slots=True)
class _Seen:
    """A trial up to its last check. `total`, `count`: of its finite scores since `grace`."""

    look: int = 0
    best: float = -math.inf
    total: float = 0.0
    count: int = 0

    def mean(self) -> float | None:
        """Mean score; None if there is no finite one."""
        return self.total / self.count if self.count else None


class Median(Rule):
    """Checks a trial every `every` tokens, at most `MOST_LOOKS` times in `tokens`.

    Before `grace` tokens it stops no trial, and scores do not count in the means.
    """

    def __init__(self, every: int, grace: int, tokens: int) -> None:
        self._every, self._grace = max(every, tokens // MOST_LOOKS), grace
        self._looks: dict[int, Ordered] = {}
        """Number of the check -> running means of all trials that have reached it."""
        self._trials: dict[str, _Seen] = {}

    def report(self, trial: str, tokens: int, score: float) -> Decision:
        """Checks once per `every` tokens."""
        look = tokens // self._every
        seen = self._trials.get(trial)
        if look <= (seen.look if seen else 0):
            return GO
        if seen is None:
            seen = self._trials[trial] = _Seen()
        for missed in range(seen.look + 1, look):
            self._note(missed, seen)
        seen.look, seen.best = look, max(seen.best, score)
        if tokens < self._grace:
            return GO
        if math.isfinite(score):  # else one NaN would take the trial out of the reference for good
            seen.total, seen.count = seen.total + score, seen.count + 1
        others = self._looks.get(look)
        worse = others is not None and len(others) >= _LEAST_OTHERS and seen.best < others.quantile(0.5)
        self._note(look, seen)
        return STOP if worse else GO

    def over(self, trial: str) -> None:
        """Keeps its means at the checks that it reached."""
        self._trials.pop(trial, None)

    def _note(self, look: int, seen: _Seen) -> None:
        if (mean := seen.mean()) is not None:
            self._looks.setdefault(look, Ordered()).add(mean)
