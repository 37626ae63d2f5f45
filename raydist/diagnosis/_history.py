"""The past of each rank in few numbers: of every column the lowest value in each span of time, at one scale above the other.

Runs anywhere: plain python and numpy.

    scale 0   64 bins of 30 s      the last 32 minutes
    scale 1   64 bins of 60 s      the last 64 minutes
    ...
    scale 9   64 bins of 4.3 h     the last 11 days

Why the lowest: what a step takes and gives back, garbage that is collected, the spike of a checkpoint all lie above it. What
stays for good raises it.
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
"""After a rank's first step its caches fill, its first checkpoint takes buffers: not counted as its past."""
_SLOTS = BINS + 1
"""And the bin that is newer than those of a window, for ranks that are ahead."""
_ALL = np.arange(SCALES)
EVERY = BINS // 4
"""New bins after which a scale is looked at again."""


@dataclass(frozen=True, slots=True)
class Window:
    """The past of all ranks at one scale: bins of `bin_s` seconds, the newest ends at Unix time `end`.

    `lows`: column -> [R, BINS], a row for each of `ranks`, oldest bin first; NaN where there is no reading. `step` is always there.
    """

    bin_s: float
    end: float
    ranks: tuple[int, ...]
    lows: Mapping[str, NDArray[np.float64]]


class _Past:
    """One rank's: `bins` [SCALES, _SLOTS, C] in rings, by a bin's number modulo _SLOTS."""

    def __init__(self, columns: int) -> None:
        self.first_step: int | None = None
        self.warm_at: float | None = None
        self.bins = np.full((SCALES, _SLOTS, columns), np.nan)
        self.newest = np.full(SCALES, -1)
        self.now = np.full(columns, np.nan)
        self.number = -1

    def close(self) -> None:
        """The bin that was open is whole: it goes into all scales."""
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
    """Takes rows of raydist.run.telemetry_schema; `windows` gives those that are due. Memory: 26 KB a rank with five columns."""

    def __init__(self, columns: Sequence[str], bin_s: float = BIN_S, warmup_s: float = WARMUP_S) -> None:
        self._columns = tuple(dict.fromkeys(("step", *columns)))
        self._bin_s, self._warmup_s = bin_s, warmup_s
        self._attempt = -1
        self._pasts: dict[int, _Past] = {}
        self._newest = -1
        self._due: list[int] = []

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows of ranks, of the newest attempt, count: its processes are new ones. Each rank's come in order of time."""
        for row in rows:
            if row["kind"] != "rank" or row["attempt"] < self._attempt:
                continue
            if row["attempt"] > self._attempt:
                self._attempt = row["attempt"]
                self._pasts.clear()
                self._due.clear()
            past = self._pasts.get(row["rank"])
            if past is None:
                past = self._pasts[row["rank"]] = _Past(len(self._columns))
            self._take(past, row)

    def _take(self, past: _Past, row: Mapping[str, Any]) -> None:
        at = row["at"]
        if past.warm_at is None and (step := row.get("step")):
            past.first_step = past.first_step or step
            if step > past.first_step:
                past.warm_at = at + self._warmup_s
        if past.warm_at is None or at < past.warm_at:
            return
        number = int(at // self._bin_s)
        if number < past.number:  # its clock was set back: the bin goes on
            number = past.number
        if number > past.number:
            if past.number >= 0:
                past.close()
            if not self._due:  # a scale is due once the first rank could have filled it
                self._due = [(number >> scale) + BINS for scale in range(SCALES)]
            past.number = number
            # Ranks that are behind this one have a bin's time to close theirs.
            self._newest = max(self._newest, number - 2)
        for i, column in enumerate(self._columns):
            value = row.get(column)
            if value is not None and not value >= past.now[i]:
                past.now[i] = value

    def windows(self) -> Iterator[Window]:
        """Those that have EVERY new bins since they were last given; the shortest first."""
        for scale, due in enumerate(self._due):
            end = ((self._newest + 1) >> scale) - 1
            if end >= due:
                self._due[scale] = end + EVERY
                yield self._window(scale, end)

    def _window(self, scale: int, end: int) -> Window:
        ranks = tuple(sorted(self._pasts))
        lows = np.stack([self._pasts[rank].last(scale, end) for rank in ranks])
        bin_s = self._bin_s * (1 << scale)
        return Window(bin_s, (end + 1) * bin_s, ranks, {c: lows[:, :, i] for i, c in enumerate(self._columns)})
