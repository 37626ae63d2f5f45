"""Whose turn it is, where more cells are under way than fit.

Runs in: the driver's thread of Ray Tune. Imports ray.tune; never torch.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort

from ray.tune.experiment import Trial


class PausedTrials:
    """Trials that are paused until it is their turn: that of the cell trained least, of equal ones the one that came first."""

    def __init__(self) -> None:
        self._order: list[tuple[int, int, Trial]] = []
        self._entries: dict[Trial, tuple[int, int, Trial]] = {}
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self._order)

    def wait(self, trial: Trial, tokens: int) -> None:
        """The trial is to be paused."""
        self._entries[trial] = tokens, next(self._count), trial
        insort(self._order, self._entries[trial])

    def first(self) -> Trial | None:
        """The first that Ray Tune could start: while it pauses a trial it cannot."""
        return next((trial for *_, trial in self._order if trial.status in (Trial.PAUSED, Trial.PENDING)), None)

    def leave(self, trial: Trial) -> None:
        """It has started, or never will. Nothing, if it does not wait."""
        if (entry := self._entries.pop(trial, None)) is not None:
            del self._order[bisect_left(self._order, entry)]
