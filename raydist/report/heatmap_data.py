"""Data of the heat maps: ranks over time, and over steps, from the readings of a run.

Runs anywhere. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raydist.report.telemetry_reader import Readings, Track

COLUMNS, ROWS = 200, 125
"""Largest size of a grid; with more ranks than rows, ranks share rows."""
READ = 5
"""Minimum number of readings per column of the slowness map."""
SHARES = ("compute", "exposed", "data")
"""What the maps of shares show of `Track.counter`."""
_SHARE_COLUMNS = 100
"""There are several of these maps on a page."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Grid:
    """values [R, C], NaN where unknown. Column j is from edges[j] to edges[j + 1]; `rows` [R]: the ranks of each row."""

    edges: Array
    values: Array
    rows: list[str]
    group: int = 1
    """Ranks per row; a row has their highest values."""

    def grouped(self) -> Grid:
        """The same with at most ROWS rows."""
        group = -(-len(self.values) // ROWS)
        if group == 1:
            return self
        starts = range(0, len(self.values), group)
        values = [np.fmax.reduce(self.values[i : i + group], axis=0) for i in starts]
        ends = [min(i + group, len(self.values)) - 1 for i in starts]
        names = [f"{i}" if i == end else f"{i}-{end}" for i, end in zip(starts, ends, strict=True)]
        return Grid(self.edges, np.stack(values), names, group)


def memory(readings: Readings, start: float, end: float) -> tuple[str, Grid] | None:
    """(column of raydist.run.telemetry_schema, bytes over seconds since `start`): the maximum per cell. None without readings."""
    name = readings.memory()
    if name is None or end <= start:
        return None
    times = np.concatenate([track.at for track in readings.tracks])
    gap = _gap(readings.tracks)
    columns = int(np.clip((times.max() - times.min()) / (1.5 * gap) if gap else 1, 1, COLUMNS))
    edges = np.linspace(0.0, end - start, columns + 1)
    values = np.full((_ranks(readings), columns), np.nan)
    for track in readings.tracks:
        column = np.clip(np.searchsorted(edges, track.at - start, side="right") - 1, 0, columns - 1)
        np.fmax.at(values[track.rank], column, track.values[name])
    return name, _grid(edges, values)


def slowness(readings: Readings, last_step: int) -> Grid | None:
    """Compute seconds per step, divided by the median over ranks for the same steps. None with fewer than two ranks.

    For an even number of ranks the lower median is used, so that of two ranks the slower one stands out. For steps that were
    trained twice, the newest attempt counts.
    """
    ranks = _ranks(readings)
    tracks = [
        track for track in sorted(readings.tracks, key=lambda t: t.attempt) if len(track.by_step("compute")[0]) > 1
    ]
    if ranks < 2 or last_step < 1 or not tracks:
        return None
    # With too few readings, a column would show when readings were taken, and not how fast ranks compute.
    most = max(len(track.by_step("compute")[0]) for track in tracks)
    share = max(track.by_step("compute")[0][-1] - track.by_step("compute")[0][0] for track in tracks) / last_step
    columns = int(np.clip(most / READ / max(share, 1e-9), 1, min(COLUMNS, last_step)))
    edges = np.linspace(0.0, float(last_step), columns + 1)
    spent = np.full((ranks, columns), np.nan)
    for track in tracks:
        steps, seconds = track.by_step("compute")
        lo, hi = np.maximum(edges[:-1], steps[0]), np.minimum(edges[1:], steps[-1])
        inside = hi - lo >= (edges[1] - edges[0]) / 2
        grew = np.interp(hi, steps, seconds) - np.interp(lo, steps, seconds)
        spent[track.rank, inside] = grew[inside] / (hi - lo)[inside]
    known = np.isfinite(spent).sum(axis=0)
    middle = np.full(columns, np.nan)
    middle[known > 1] = np.nanquantile(spent[:, known > 1], 0.5, axis=0, method="lower")
    with np.errstate(divide="ignore", invalid="ignore"):
        values = spent / middle
    values[~np.isfinite(values)] = np.nan
    return _grid(edges, values)


def shares(readings: Readings, start: float, end: float) -> dict[str, Grid] | None:
    """Share of each of SHARES in the ranks' time, over seconds since `start`. None if no cell is known.

    A cell is known if readings cover at least half of it.
    """
    tracks = [track for track in readings.tracks if len(track.at) > 1]
    if not tracks or end <= start:
        return None
    gap = _gap(tracks)
    columns = int(np.clip((end - start) / (2 * gap) if gap else 1, 1, _SHARE_COLUMNS))
    edges = np.linspace(0.0, end - start, columns + 1)
    covered = np.zeros((_ranks(readings), columns))
    spent = {name: np.zeros_like(covered) for name in SHARES}
    for track in tracks:
        at = track.at - start
        lo, hi = np.clip(edges[:-1], at[0], at[-1]), np.clip(edges[1:], at[0], at[-1])
        covered[track.rank] += hi - lo
        for name in SHARES:
            seconds = track.counter(name)
            spent[name][track.rank] += np.interp(hi, at, seconds) - np.interp(lo, at, seconds)
    known = covered >= (edges[1] - edges[0]) / 2
    if not known.any():
        return None
    share = {
        name: np.clip(np.divide(one, covered, where=known, out=np.full_like(one, np.nan)), 0.0, 1.0)
        for name, one in spent.items()
    }
    return {name: _grid(edges, values) for name, values in share.items()}


def _ranks(readings: Readings) -> int:
    return 1 + max((track.rank for track in readings.tracks), default=-1)


def _gap(tracks: Sequence[Track]) -> float:
    """Seconds between readings: the median of each track, and the largest of these."""
    return max((float(np.median(np.diff(track.at))) for track in tracks if len(track.at) > 1), default=0.0)


def _grid(edges: Array, values: Array) -> Grid:
    return Grid(edges, values, [str(rank) for rank in range(len(values))])
