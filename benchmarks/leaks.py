"""False alarms and delay of the leak rule, compared with Mann-Kendall's test. No timing: all results follow from the seed.

    python benchmarks/leaks.py [--windows 20000]

`wrong`: the share of random windows of 64 lows without a leak that each test reports as a leak, with the same minimum growth of 5%
and 16 MiB. Mann-Kendall's test has the level of the rule's t for independent increments, 7e-7 (z 4.8), with the correction for
ties: plain, and with the variance of Hamed and Rao (1998) for autocorrelation. `minutes`: from the first step to the finding, for
a process of 2 GiB with one reading per second, eight runs each; null: not within ten days.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import write

from raydist.diagnosis import BINS, History, leak
from tests.diagnosis.test_leak import NO_LEAKS, STEPS

GIB = 2**30
Z = 4.83
RUNS, DAYS, PER_ROW = 8, 10, 30
Floats = NDArray[np.float64]


def mann_kendall(lows: Floats, corrected: bool) -> NDArray[np.bool_]:
    """[n, BINS] -> [n]: which rows have an upward trend."""
    n = BINS
    i, j = np.triu_indices(n, 1)
    differences = lows[:, j] - lows[:, i]
    s = np.sign(differences).sum(-1)
    ties = [np.unique(row, return_counts=True)[1] for row in lows]
    variance = np.array([(n * (n - 1) * (2 * n + 5) - (c * (c - 1) * (2 * c + 5)).sum()) / 18 for c in ties])
    if corrected:
        slopes = np.median(differences / (j - i), axis=-1)
        rest = lows - slopes[:, None] * np.arange(n)
        ranks = rest.argsort(-1).argsort(-1) - (n - 1) / 2
        lags = np.arange(1, n)
        rho = np.stack([(ranks[:, k:] * ranks[:, :-k]).sum(-1) for k in lags], -1) / (ranks**2).sum(-1)[:, None]
        rho[np.abs(rho) < 1.96 / np.sqrt(n)] = 0.0
        factor = 1 + 2 / (n * (n - 1) * (n - 2)) * ((n - lags) * (n - lags - 1) * (n - lags - 2) * rho).sum(-1)
        variance *= np.maximum(factor, 1.0)
    z = (s - np.sign(s)) / np.sqrt(np.maximum(variance, 1e-9))
    size = BINS // leak.SEGMENTS
    first, last = np.median(lows[:, :size], -1), np.median(lows[:, -size:], -1)
    return (z >= Z) & (last - first >= np.maximum(leak.GROWTH * first, leak.LEAST_BYTES))


def wrong(windows: int) -> dict[str, dict[str, float]]:
    """Share of windows without a leak that are reported as a leak."""
    shares: dict[str, dict[str, float]] = {}
    rng = np.random.default_rng(1)
    for name, make in NO_LEAKS.items():
        found = np.zeros(3)
        some = min(windows, 2000)
        for _ in range(0, windows, some):
            lows = 4 * GIB * make(rng, some)
            found[0] += leak.leaks(lows, np.broadcast_to(STEPS, lows.shape)).sum()
        for part in np.split(lows, 10):
            found[1] += mann_kendall(part, corrected=False).sum()
            found[2] += mann_kendall(part, corrected=True).sum()
        shares[name] = {
            "leak": found[0] / windows,
            "mann_kendall": found[1] / some,
            "hamed_rao": found[2] / some,
        }
        print(f"{name:42}", *(f"{share:9.2%}" for share in shares[name].values()), flush=True)
    return shares


def late(percent: float, noise: float, garbage: float, seed: int) -> float | None:
    """Minutes until a leak of `percent` per minute is found; None if not within DAYS."""
    rng, history = np.random.default_rng(seed), History(leak.LONG)
    for begin in range(0, DAYS * 86_400, PER_ROW):
        at = begin + np.arange(PER_ROW)
        readings = (
            2 * GIB * (1 + percent / 100 * at / 60 + noise * rng.standard_normal(PER_ROW) + garbage * (at % 90) / 90)
        )
        # Only the lowest reading of a bin counts.
        row: dict[str, Any] = {"kind": "rank", "rank": 0, "attempt": 1, "step": begin + 2}
        history.add([{**row, "at": float(begin), "anon_bytes": float(readings.min())}])
        if any(leak.leak(window) for window in history.windows()):
            return begin / 60
    return None


def main() -> None:
    """Runs, prints, and writes results/leaks.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--windows", type=int, default=20_000)
    windows = parser.parse_args().windows
    shares = wrong(windows)
    minutes = {}
    for noise, garbage in ((0.002, 0.0), (0.01, 0.0), (0.002, 0.1)):
        for percent in (5.0, 1.0, 0.2, 0.1, 0.02):
            found = sorted(late(percent, noise, garbage, seed) or np.inf for seed in range(RUNS))
            told = [None if np.isinf(m) else round(m) for m in (found[RUNS // 2], found[-1])]
            minutes[f"{percent:g}% a minute, noise {noise:.1%}, garbage {garbage:.0%}"] = {
                "median": told[0],
                "worst": told[1],
            }
            print(
                f"{percent:g}% a minute, noise {noise:.1%}, garbage {garbage:.0%}: {told[0]} min, worst {told[1]}",
                flush=True,
            )
    write("leaks", {"windows": windows, "wrong": shares, "minutes": minutes})


if __name__ == "__main__":
    main()
