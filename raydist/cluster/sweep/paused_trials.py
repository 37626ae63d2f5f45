"""The order in which paused trials run again, if more trials are in progress than fit.

Runs in: the driver's thread of Ray Tune. Imports ray.tune; never torch.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort

from ray.tune.experiment import Trial


class PausedTrials:
    """A queue of paused trials. First is the one with the fewest tokens; of equal ones, the one that was paused first."""

    def __init__(self) -> None:
        self._order: list[tuple[int, int, Trial]] = []
        self._entries: dict[Trial, tuple[int, int, Trial]] = {}
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self._order)

    def wait(self, trial: Trial, tokens: int) -> None:
        """Adds a trial that is about to be paused."""
        self._entries[trial] = tokens, next(self._count), trial
        insort(self._order, self._entries[trial])

    def first(self) -> Trial | None:
        """The first trial that Ray Tune can start: it cannot start one that it is still pausing."""
        return next((trial for *_, trial in self._order if trial.status in (Trial.PAUSED, Trial.PENDING)), None)

    def leave(self, trial: Trial) -> None:
        """Removes a trial that has started, or never will. Does nothing if it is not in the queue."""
        if (entry := self._entries.pop(trial, None)) is not None:
            del self._order[bisect_left(self._order, entry)]
