"""Memory that grows, step by step, with no reason: a leak. Named with rank and kind once it has added 5% over half an hour.

Runs anywhere: plain python and numpy.

The lows of 64 bins are cut into 16 segments, each of which counts with its median. Between these are 15 increments, and the test
is whether their mean is above zero: Student's t. Why not Mann-Kendall: it asks whether there is an order in time, and memory that
wanders (fragments, caches) has one. Its changes add up, so its levels are no independent draws, and the correction for
autocorrelation (Hamed and Rao 1998) does not reach that far: docs/memory.md has both rates. Of a random walk the *increments* are
all but independent, which is what t wants; of noise about a level they cancel out, and t is next to nothing; one jump,
however high, gives 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raydist.diagnosis._history import BINS, Window
from raydist.records import Finding

COLUMNS = ("allocated_bytes", "reserved_bytes", "anon_bytes")
"""Most telling first. Not rss_bytes: a mapped dataset grows that, as far as it was read, and the kernel takes it back."""

SEGMENTS = 16
T = 8.0
"""Least t of the increments: with 14 degrees of freedom one draw in a million has it."""
GROWTH = 0.05
LEAST_BYTES = 16 << 20
STEADY = 0.9
"""Least growth of the second half over that of the first: what fills up slows down."""
READ = 0.75
"""Least share of the bins that have a reading."""
NAMED = 20

_WHAT = {
    "allocated_bytes": "what tensors hold on the GPU",
    "reserved_bytes": "what torch's allocator holds on the GPU",
    "anon_bytes": "the memory of its process",
}
_REMEDY = {
    "allocated_bytes": "look for tensors that outlive their step: losses kept without .detach() or .item(), lists of outputs, "
    "hooks; two of raydist.worker.metrics.memory.snapshot(), some minutes apart, show what is new",
    "reserved_bytes": "tensors do not grow, so it is fragmentation: set PYTORCH_CUDA_ALLOC_CONF to expandable_segments:True in "
    "cluster.env, and keep shapes the same from step to step",
    "anon_bytes": "look for what grows in the Python code of your model and data: lists that each step appends to, caches without "
    "bound, losses kept with their graphs; tracemalloc names the lines",
}


def check(window: Window) -> Finding | None:
    """The rank and kind of the first of COLUMNS that leaks, the rank that grows most; others of all kinds are in `figures`."""
    found = [(kind, row) for kind in COLUMNS for row in np.flatnonzero(leaks(window.lows[kind], window.lows["step"]))]
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
    also = f"; {more} more of ranks and kinds grow too" if more else ""
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
    )


def leaks(lows: NDArray[np.float64], steps: NDArray[np.float64]) -> NDArray[np.bool_]:
    """[R, BINS] lows of one kind, and of the step -> [R]: which ranks leak."""
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
    """The median slope between all pairs, a bin (Sen 1968): a few odd bins do not bend it. NaN is passed over."""
    at = np.flatnonzero(~np.isnan(values))
    i, j = np.triu_indices(len(at), 1)
    return float(np.median((values[at[j]] - values[at[i]]) / (at[j] - at[i])))


def _growth(lows: NDArray[np.float64]) -> float:
    """Of the last segment over the first."""
    size = BINS // SEGMENTS
    return float(np.nanmedian(lows[-size:]) / np.nanmedian(lows[:size]) - 1)
