"""A compact history of each rank: the minimum of every column in each time bin, at ten time scales.

Runs anywhere: plain python and numpy.

    scale 0   64 bins of 30 s      the last 32 minutes
    scale 1   64 bins of 60 s      the last 64 minutes
    ...
    scale 9   64 bins of 4.3 h     the last 11 days

Why the minimum: memory that a step allocates and frees, uncollected garbage and the peak of a checkpoint all lie above it. Only
memory that is never freed raises it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BINS = 64
BIN_S = 30.0
SCALES = 10
WARMUP_S = 120.0
"""Left out of the history: after a rank's first step its caches fill, and its first checkpoint allocates buffers."""
_SLOTS = BINS + 1
"""BINS plus one newer bin than the window's, for ranks that are ahead."""
_ALL = np.arange(SCALES)
EVERY = BINS // 4
"""New bins after which the rules check a scale again."""


@dataclass(frozen=True, slots=True)
class Lows:
    """The history of all ranks at one scale: bins of `bin_s` seconds; the newest ends at Unix time `end`.

    `lows`: column -> [R, BINS], one row per rank in `ranks`, oldest bin first; NaN: no reading. Always contains `step`.
    """

    bin_s: float
    end: float
    ranks: tuple[int, ...]
    lows: Mapping[str, NDArray[np.float64]]


class _RankHistory:
    """One rank's history: `bins` [SCALES, _SLOTS, C] are ring buffers, indexed by bin number modulo _SLOTS."""

    def __init__(self, columns: int) -> None:
        self.first_step: int | None = None
        self.warm_at: float | None = None
        self.bins = np.full((SCALES, _SLOTS, columns), np.nan)
        self.newest = np.full(SCALES, -1)
        self.now = np.full(columns, np.nan)
        self.number = -1

    def close(self) -> None:
        """The open bin is complete: merges it into all scales."""
        numbers = self.number >> _ALL
        for scale in np.flatnonzero(numbers > self.newest):
            first = max(int(self.newest[scale]) + 1, int(numbers[scale]) - _SLOTS + 1)
            self.bins[scale, np.arange(first, numbers[scale] + 1) % _SLOTS] = np.nan
        self.newest = numbers
        places = numbers % _SLOTS
        self.bins[_ALL, places] = np.fmin(self.bins[_ALL, places], self.now)
        self.now.fill(np.nan)

    def last(self, scale: int, end: int) -> NDArray[np.float64]:
        """[BINS, C] of the bins up to number `end`, oldest first."""
        numbers = np.arange(end - BINS + 1, end + 1)
        found: NDArray[np.float64] = self.bins[scale, numbers % _SLOTS]
        found[(numbers > self.newest[scale]) | (numbers <= self.newest[scale] - _SLOTS)] = np.nan
        return found


class History:
    """Takes rows of raydist.run.telemetry_schema; `windows` yields those that are due. Memory: 26 KB per rank with five columns."""

    def __init__(self, columns: Sequence[str], bin_s: float = BIN_S, warmup_s: float = WARMUP_S) -> None:
        self._columns = tuple(dict.fromkeys(("step", *columns)))
        self._bin_s, self._warmup_s = bin_s, warmup_s
        self._attempt = -1
        self._ranks: dict[int, _RankHistory] = {}
        self._newest = -1
        self._due: list[int] = []

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Uses rows of ranks of the newest attempt only, because its processes are new. Each rank's rows are in order of time."""
        for row in rows:
            if row["kind"] != "rank" or row["attempt"] < self._attempt:
                continue
            if row["attempt"] > self._attempt:
                self._attempt = row["attempt"]
                self._ranks.clear()
                self._due.clear()
            rank_history = self._ranks.get(row["rank"])
            if rank_history is None:
                rank_history = self._ranks[row["rank"]] = _RankHistory(len(self._columns))
            self._take(rank_history, row)

    def _take(self, rank_history: _RankHistory, row: Mapping[str, Any]) -> None:
        at = row["at"]
        if rank_history.warm_at is None and (step := row.get("step")):
            rank_history.first_step = rank_history.first_step or step
            if step > rank_history.first_step:
                rank_history.warm_at = at + self._warmup_s
        if rank_history.warm_at is None or at < rank_history.warm_at:
            return
        number = int(at // self._bin_s)
        if number < rank_history.number:  # its clock was set back: stay in the same bin
            number = rank_history.number
        if number > rank_history.number:
            if rank_history.number >= 0:
                rank_history.close()
            if not self._due:  # a scale is due once the first rank can have filled it
                self._due = [(number >> scale) + BINS for scale in range(SCALES)]
            rank_history.number = number
            # Ranks that are behind this one get one more bin's time to close theirs.
            self._newest = max(self._newest, number - 2)
        for i, column in enumerate(self._columns):
            value = row.get(column)
            if value is not None and not value >= rank_history.now[i]:
                rank_history.now[i] = value

    def windows(self) -> Iterator[Lows]:
        """The windows with at least EVERY new bins since the last call that returned them; the shortest first."""
        for scale, due in enumerate(self._due):
            end = ((self._newest + 1) >> scale) - 1
            if end >= due:
                self._due[scale] = end + EVERY
                yield self._window(scale, end)

    def _window(self, scale: int, end: int) -> Lows:
        ranks = tuple(sorted(self._ranks))
        lows = np.stack([self._ranks[rank].last(scale, end) for rank in ranks])
        bin_s = self._bin_s * (1 << scale)
        return Lows(bin_s, (end + 1) * bin_s, ranks, {c: lows[:, :, i] for i, c in enumerate(self._columns)})
