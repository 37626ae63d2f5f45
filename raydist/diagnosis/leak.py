"""Finds memory leaks: memory that grows steadily, by at least 5% over half an hour. Reports the rank and the kind of memory.

Runs anywhere: plain python and numpy.

The minima of 64 bins are grouped into 16 segments, and each segment is represented by its median. There are 15 increments between
them, and Student's t tests whether their mean is above zero. Why not Mann-Kendall: it tests for a trend in time, and memory that
drifts at random (fragmentation, caches) has one. Its changes add up, so its levels are not independent samples, and the
correction for autocorrelation (Hamed and Rao 1998) is not enough: docs/explanation/memory.md has both error rates. The
*increments* of a random walk are almost independent, as t requires. Noise around a constant level cancels out, and t is close to
zero. A single jump, however large, gives t = 1.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from raydist.diagnosis._history import BINS, Lows
from raydist.diagnosis._symptoms import figure
from raydist.diagnosis._window import Window
from raydist.records import Finding

ONCE = True
CAUSE = "memory leaks, on the device or on the host"
LOOKS = "the minima of memory in 64 bins, from half a minute to four hours each: steady growth"
THRESHOLDS = {
    "t": ("8 of Student's t, of 15 increments", "one in a million by chance (docs/explanation/memory.md)"),
    "growth": ("5%, and 16 MiB", "below it a run of days has room (docs/explanation/memory.md)"),
    "steady": ("0.9 of the first half's growth in the second", "a cache that fills up slows down"),
}
LONG = ("allocated_bytes", "reserved_bytes", "anon_bytes")
"""Most specific first. Not rss_bytes: a memory-mapped dataset raises it as it is read, and the kernel can reclaim that."""

SEGMENTS = 16
T = 8.0
"""Minimum t of the increments: with 14 degrees of freedom, the probability of reaching it by chance is one in a million."""
GROWTH = 0.05
LEAST_BYTES = 16 << 20
STEADY = 0.9
"""Minimum ratio of the growth of the second half to that of the first: a cache that fills up slows down."""
READ = 0.75
"""Minimum share of bins that have a reading."""
NAMED = 20

_WHAT = {
    "allocated_bytes": "GPU memory of tensors",
    "reserved_bytes": "GPU memory of torch's allocator",
    "anon_bytes": "memory of the process",
}
_REMEDY = {
    "allocated_bytes": "look for tensors that are kept after their step: losses kept without .detach() or .item(), lists of "
    "outputs, hooks; compare two calls of raydist.worker.metrics.memory.snapshot(), some minutes apart",
    "reserved_bytes": "the memory of tensors does not grow, so it is fragmentation: set PYTORCH_CUDA_ALLOC_CONF to "
    "expandable_segments:True in cluster.env, and keep shapes the same from step to step",
    "anon_bytes": "look for objects that grow in the Python code of your model and data: lists that each step appends to, caches "
    "without a limit, losses kept with their graphs; tracemalloc shows the lines",
}


def check(window: Window) -> Iterator[Finding]:
    """At each scale that has new bins."""
    for lows in window.lows:
        finding = leak(lows)
        if finding is not None:
            yield finding


def leak(window: Lows) -> Finding | None:
    """The leak of the first kind in LONG that leaks, on the rank where it grows most; the others are in `figures`."""
    found = [(kind, row) for kind in LONG for row in np.flatnonzero(leaks(window.lows[kind], window.lows["step"]))]
    if not found:
        return None
    first = found[0][0]
    of_kind = [row for kind, row in found if kind == first]
    grown = [_growth(window.lows[first][row]) for row in of_kind]
    worst = of_kind[int(np.argmax(grown))]
    lows, steps = window.lows[first][worst], window.lows["step"][worst]
    slope = theil_sen(lows)
    minute, trained = slope * 60 / window.bin_s, float(np.nanmax(steps) - np.nanmin(steps))
    now = float(np.nanmedian(lows[-BINS // SEGMENTS :]))
    minutes = BINS * window.bin_s / 60
    rank = window.ranks[worst]
    more = len(found) - 1
    also = f"; {more} more (rank, kind) pairs grow too" if more else ""
    return Finding(
        rule="leak",
        rank=rank,
        severity="warning",
        what=f"rank {rank}: {_WHAT[first]} has grown by {max(grown):.1%} in {minutes:.0f} minutes, "
        f"{minute / 2**20:.3g} MiB a minute{also}",
        figures={
            "kind": first,
            "bytes": now,
            "bytes_per_minute": minute,
            "bytes_per_step": slope * (BINS - 1) / trained,
            "growth": max(grown),
            "minutes": minutes,
            "also": [{"rank": window.ranks[row], "kind": kind} for kind, row in found if (kind, row) != (first, worst)][
                :NAMED
            ],
        },
        remedy=_REMEDY[first],
        cause="objects are kept after their step"
        if first != "reserved_bytes"
        else "the allocator's blocks fit no tensor",
        culprit={"rank": rank, "kind": first},
        evidence=[
            figure("bytes a minute", minute, f"telemetry: {first}, median slope of {BINS} minima"),
            figure("growth", max(grown), f"telemetry: {first}"),
        ],
        others=[{"cause": "a cache that fills up", "against": "its growth has not slowed down over the window"}],
        confidence=0.9,
    )


def leaks(lows: NDArray[np.float64], steps: NDArray[np.float64]) -> NDArray[np.bool_]:
    """[R, BINS] minima of one kind of memory, and of the step -> [R]: which ranks leak."""
    read = ~np.isnan(lows)
    whole = read.reshape(-1, SEGMENTS, BINS // SEGMENTS).any(-1).all(-1) & (read.mean(-1) >= READ)
    found = np.zeros(len(lows), dtype=bool)
    medians = np.nanmedian(lows[whole].reshape(-1, SEGMENTS, BINS // SEGMENTS), axis=-1)
    increments = np.diff(medians)
    mean, error = increments.mean(-1), increments.std(-1, ddof=1) / np.sqrt(SEGMENTS - 1)
    half = SEGMENTS // 2
    early, late = medians[:, half - 1] - medians[:, 0], medians[:, -1] - medians[:, half]
    growth = medians[:, -1] - medians[:, 0]
    trained = np.nanmax(steps[whole], axis=-1) > np.nanmin(steps[whole], axis=-1)
    found[whole] = (
        (growth >= LEAST_BYTES)
        & (growth >= GROWTH * medians[:, 0])
        & (mean >= T * error)
        & (late >= STEADY * early)
        & trained
    )
    return found


def theil_sen(values: NDArray[np.float64]) -> float:
    """The median slope between all pairs, per bin (Sen 1968), robust to outliers. NaN is ignored."""
    at = np.flatnonzero(~np.isnan(values))
    i, j = np.triu_indices(len(at), 1)
    return float(np.median((values[at[j]] - values[at[i]]) / (at[j] - at[i])))


def _growth(lows: NDArray[np.float64]) -> float:
    """Relative growth from the first segment to the last."""
    size = BINS // SEGMENTS
    return float(np.nanmedian(lows[-size:]) / np.nanmedian(lows[:size]) - 1)
