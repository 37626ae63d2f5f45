"""What bucket sizes cost, on paper: the line of an all-reduce, DDP's buckets, and what backward leaves of them exposed.

Runs anywhere. Pure: plain python and numpy, no torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

MIB = 2**20
DEFAULT_MB = 25.0
DEFAULT_FIRST = MIB
"""torch's own: buckets of 25 MiB, the first of 1 MiB. A size of the user's is that of the first one too."""
CANDIDATES_MB = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
WORTH = 0.03
"""A share of a pass. A gain below it is within what two measurements of the same differ by."""

_AS_GOOD = 0.01
"""A share of a pass by which sizes may differ and count as equal. Of such the middle one stands best what the model does not know:
what a bucket costs besides (small ones), and a backward that is quicker than the measured one (large ones)."""


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """The time of a message of n bytes as a line: alpha + beta n, in seconds (Hockney 1994). 1 / beta is the bandwidth.

    `residual`: the median of |line - measured| / measured over what it was fitted to.
    """

    alpha: float
    beta: float
    residual: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """Of one message."""
        return self.alpha + self.beta * nbytes

    def __str__(self) -> str:
        speed = f"{1e-6 / self.beta:,.0f} MB/s" if self.beta else "no limit seen"
        return f"{self.alpha * 1e6:,.0f} us and {speed}"


def fit(points: Sequence[tuple[float, float]]) -> AlphaBeta:
    """The line through (bytes, seconds) that is off by the smallest share; neither alpha nor beta is negative.

    Of each size the median counts, so that a disturbed message does not; and each size counts alike, so that the few large ones are
    not taken for errors beside the many small ones. Then least squares on (line - t) / t, for the times span orders of magnitude.
    Raises ValueError for fewer than two sizes.
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
    if alpha < 0.0:  # the best line on the edge of what is allowed
        alpha, beta = 0.0, float(np.sum(weights * x * y) / np.sum(weights * x * x))
    return AlphaBeta(alpha, beta, statistics.median(abs(alpha + beta * n - t) / t for n, t in points))


@dataclass(frozen=True, slots=True)
class Arrival:
    """A gradient: its bytes, and when it is there, in seconds from the start of backward."""

    nbytes: int
    at: float


def evenly(sizes: Sequence[int], backward_s: float) -> list[Arrival]:
    """Gradients of these sizes, in the order in which they come, as if backward made its bytes at one speed."""
    total = max(sum(sizes), 1)
    return [Arrival(n, backward_s * done / total) for n, done in zip(sizes, accumulate(sizes), strict=True)]


def buckets(arrivals: Sequence[Arrival], bucket_mb: float | None) -> list[Arrival]:
    """DDP's buckets: each is closed by the gradient that fills it, and there when its last one is. None: torch's default."""
    limit = DEFAULT_FIRST if bucket_mb is None else bucket_mb * MIB
    made, nbytes, at = [], 0, 0.0
    for arrival in arrivals:
        nbytes, at = nbytes + arrival.nbytes, max(at, arrival.at)
        if nbytes >= limit:
            made.append(Arrival(nbytes, at))
            nbytes, limit = 0, (DEFAULT_MB if bucket_mb is None else bucket_mb) * MIB
    return [*made, Arrival(nbytes, at)] if nbytes else made


def exposed(made: Sequence[Arrival], backward_s: float, line: AlphaBeta, share: float = 1.0) -> float:
    """Seconds from backward's end to that of the last bucket's all-reduce. They go one after another, each once it is there.

    `share`: of a bucket's bytes that is sent; less than 1 where sums are in fewer bits than gradients.
    """
    end = 0.0
    for bucket in made:
        end = max(end, bucket.at) + line.seconds(bucket.nbytes * share)
    return max(end - backward_s, 0.0)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A bucket size in MiB, None for torch's default; the seconds that the model says it and the default leave exposed."""

    bucket_mb: float | None
    exposed_s: float
    default_s: float
    because: str


def suggest(
    arrivals: Sequence[Arrival], pass_s: float, backward_s: float, line: AlphaBeta, share: float = 1.0
) -> Suggestion:
    """The size that leaves least exposed, the middle one of those as good; torch's where the gain is no `WORTH` of a pass.

    `pass_s`: a forward and a backward pass without communication, of which `backward_s` is the latter. `share`: see `exposed`.
    """
    default_s = exposed(buckets(arrivals, None), backward_s, line, share)
    found, before = {}, list[Arrival]()
    for mb in CANDIDATES_MB:
        if (made := buckets(arrivals, mb)) != before:  # else no larger one makes a difference
            found[mb], before = exposed(made, backward_s, line, share), made
    as_good = [mb for mb, seconds in found.items() if seconds <= min(found.values()) + _AS_GOOD * pass_s]
    best = as_good[(len(as_good) - 1) // 2]
    total = sum(a.nbytes for a in arrivals)
    facts = f"an all-reduce costs {line}, gradients are {total / MIB:.1f} MiB, backward {_ms(backward_s)}"
    gain = (default_s - found[best]) / (pass_s + default_s) if pass_s + default_s > 0 else 0.0
    if gain < WORTH:
        because = (
            f"no size is expected to gain {WORTH:.0%} on the {_ms(default_s)} that torch's leaves exposed: {facts}"
        )
        return Suggestion(None, default_s, default_s, because)
    count = len(buckets(arrivals, best))
    because = (
        f"{count} bucket{'s' if count != 1 else ''} of {best:g} MiB should leave {_ms(found[best])} exposed, torch's leave "
        f"{_ms(default_s)}: {facts}"
    )
    return Suggestion(best, found[best], default_s, because)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
