"""A cost model of bucket sizes: the line of an all-reduce, DDP's buckets, and their time that backward does not hide.

Runs anywhere. Pure: plain python and numpy, no torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIB = 2**20
DEFAULT_MB = 25.0
DEFAULT_FIRST = MIB
"""torch's defaults: buckets of 25 MiB, the first of 1 MiB. A size that the user sets is also that of the first one."""
CANDIDATES_MB = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
WORTH = 0.03
"""A share of a pass. Two measurements of the same buckets differ by up to this share."""

_AS_GOOD = 0.01
"""Sizes whose times differ by less than this share of a pass count as equal. The middle one of them is the most robust against
costs outside of the model: other costs per bucket (small sizes), and a backward faster than measured (large sizes)."""


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """The time of a message of n bytes as a line: alpha + beta n, in seconds (Hockney 1994). 1 / beta is the bandwidth.

    `residual`: the median of |line - measured| / measured over the fitted points.
    """

    alpha: float
    beta: float
    residual: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """The time of one message."""
        return self.alpha + self.beta * nbytes

    def __str__(self) -> str:
        speed = f"{1e-6 / self.beta:,.0f} MB/s" if self.beta else "no limit seen"
        return f"{self.alpha * 1e6:,.0f} us and {speed}"


def fit(points: Sequence[tuple[float, float]]) -> AlphaBeta:
    """The line through (bytes, seconds) with the smallest relative errors; neither alpha nor beta is negative.

    Uses the median of each size, so that a disturbed message does not count, and the same weight for each size, because there are
    fewer large messages than small ones. Least squares on (line - t) / t, because the times span orders of magnitude. Raises
    ValueError for fewer than two sizes.
    """
    times: dict[float, list[float]] = {}
    for size, seconds in points:
        times.setdefault(size, []).append(seconds)
    if len(times) < 2:
        raise ValueError("a line needs two sizes")
    x, y = np.array(list(times), np.float64), np.array([statistics.median(t) for t in times.values()])
    weights = 1 / y**2
    mean_x, mean_y = float(np.average(x, weights=weights)), float(np.average(y, weights=weights))
    spread = float(np.sum(weights * (x - mean_x) ** 2))
    beta = max(float(np.sum(weights * (x - mean_x) * (y - mean_y))) / spread, 0.0)
    alpha = mean_y - beta * mean_x
    if alpha < 0.0:  # the best line through the origin
        alpha, beta = 0.0, float(np.sum(weights * x * y) / np.sum(weights * x * x))
    return AlphaBeta(alpha, beta, statistics.median(abs(alpha + beta * n - t) / t for n, t in points))


@dataclass(frozen=True, slots=True)
class Arrival:
    """A gradient: its bytes, and the time at which it is complete, in seconds from the start of backward."""

    nbytes: int
    at: float


def buckets(arrivals: Sequence[Arrival], bucket_mb: float | None) -> list[Arrival]:
    """DDP's buckets: the gradient that fills a bucket closes it, and a bucket is complete with its last gradient. None: torch's
    default."""
    limit = DEFAULT_FIRST if bucket_mb is None else bucket_mb * MIB
    made, nbytes, at = [], 0, 0.0
    for arrival in arrivals:
        nbytes, at = nbytes + arrival.nbytes, max(at, arrival.at)
        if nbytes >= limit:
            made.append(Arrival(nbytes, at))
            nbytes, limit = 0, (DEFAULT_MB if bucket_mb is None else bucket_mb) * MIB
    return [*made, Arrival(nbytes, at)] if nbytes else made


def exposed(made: Sequence[Arrival], backward_s: float, line: AlphaBeta, share: float = 1.0) -> float:
    """Seconds from the end of backward to the end of the last all-reduce. They run one after another, each when its bucket is
    complete.

    `share`: the share of a bucket's bytes that is sent; less than 1 if sums are in fewer bits than gradients.
    """
    end = 0.0
    for bucket in made:
        end = max(end, bucket.at) + line.seconds(bucket.nbytes * share)
    return max(end - backward_s, 0.0)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A bucket size in MiB, None for torch's default; the exposed seconds that the model predicts for it and for the default."""

    bucket_mb: float | None
    exposed_s: float
    default_s: float
    because: str


def suggest(
    arrivals: Sequence[Arrival], pass_s: float, backward_s: float, line: AlphaBeta, share: float = 1.0
) -> Suggestion:
    """The size with the least exposed time, the middle one of equal sizes; torch's if the gain is less than `WORTH` of a pass.

    `pass_s`: a forward and a backward pass without communication, `backward_s`: the backward pass alone. `share`: see `exposed`.
    """
    default_s = exposed(buckets(arrivals, None), backward_s, line, share)
    found, before = {}, list[Arrival]()
    for mb in CANDIDATES_MB:
        if (made := buckets(arrivals, mb)) != before:  # else larger sizes give the same buckets
            found[mb], before = exposed(made, backward_s, line, share), made
    as_good = [mb for mb, seconds in found.items() if seconds <= min(found.values()) + _AS_GOOD * pass_s]
    best = as_good[(len(as_good) - 1) // 2]
    total = sum(a.nbytes for a in arrivals)
    facts = f"an all-reduce costs {line}, gradients are {total / MIB:.1f} MiB, backward {_ms(backward_s)}"
    gain = (default_s - found[best]) / (pass_s + default_s) if pass_s + default_s > 0 else 0.0
    if gain < WORTH:
        because = f"no size is expected to gain {WORTH:.0%} of a pass; torch's leaves {_ms(default_s)} exposed: {facts}"
        return Suggestion(None, default_s, default_s, because)
    count = len(buckets(arrivals, best))
    because = (
        f"{count} bucket{'s' if count != 1 else ''} of {best:g} MiB should leave {_ms(found[best])} exposed, torch's leave "
        f"{_ms(default_s)}: {facts}"
    )
    return Suggestion(best, found[best], default_s, because)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
