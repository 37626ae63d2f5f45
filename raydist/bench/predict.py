"""Time of an all-reduce of n bytes over p ranks, by algorithm: closed forms in alpha and beta.

Runs anywhere. Pure. One message of m bytes between two ranks takes alpha + beta m, each rank sends and receives one message at a
time, and additions cost nothing. So all are lower bounds, for comparison with one another and with measurements.

    ring               2 (p - 1) alpha + 2 (p - 1)/p n beta: reduce-scatter, then all-gather.
                       Patarasuk & Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 2009.
    tree               2 ceil(log2 p) (alpha + n beta): binomial reduce, then broadcast.
                       Thakur, Rabenseifner & Gropp, Optimization of collective communication operations in MPICH, IJHPCA 2005.
    halving_doubling   2 log2 p alpha + 2 (p - 1)/p n beta: recursive halving, then doubling. If p is not a power of two, the ranks
                       beyond the next lower one first send their data to another rank, and get the result at the end:
                       2 (alpha + n beta) more (as in MPICH). Rabenseifner, in Thakur et al. 2005.
    torus_2d           p = x y: reduce-scatter in rows of x, all-reduce in columns of y on n/x, all-gather in rows:
                       2 (x - 1 + y - 1) alpha + 2 (p - 1)/p n beta. Mikami et al., Massively distributed SGD, arXiv:1811.05233.
"""

from __future__ import annotations

import math

from raydist.worker.comm.buckets.model import AlphaBeta


def ring(nbytes: float, world: int, link: AlphaBeta) -> float:
    """Seconds of a ring all-reduce."""
    return 2 * (world - 1) * link.seconds(nbytes / world)


def tree(nbytes: float, world: int, link: AlphaBeta) -> float:
    """Seconds of a binomial tree's reduce and broadcast."""
    return 2 * math.ceil(math.log2(world)) * link.seconds(nbytes)


def halving_doubling(nbytes: float, world: int, link: AlphaBeta) -> float:
    """Seconds of recursive halving and doubling."""
    steps = math.floor(math.log2(world))
    power: int = 2**steps
    beside = 0.0 if power == world else 2 * link.seconds(nbytes)
    return 2 * steps * link.alpha + 2 * (power - 1) / power * nbytes * link.beta + beside


def torus_2d(nbytes: float, world: int, link: AlphaBeta, row: int | None = None) -> float:
    """Seconds on a torus with rows of `row` ranks; by default the largest divisor up to sqrt(world). A prime gives a ring.

    Raises ValueError for a row that does not divide the world.
    """
    x = row or max(d for d in range(1, math.isqrt(world) + 1) if world % d == 0)
    if world % x:
        raise ValueError(f"rows of {x} do not divide {world} ranks")
    y = world // x
    return 2 * (x - 1) * link.seconds(nbytes / x) + ring(nbytes / x, y, link)


def predict(nbytes: float, world: int, link: AlphaBeta) -> dict[str, float]:
    """Algorithm -> seconds."""
    return {f.__name__: f(nbytes, world, link) for f in (ring, tree, halving_doubling, torus_2d)}
