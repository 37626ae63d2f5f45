"""Times collectives and checks every element; sizes, algbw and busbw follow the conventions of nccl-tests.

Runs in: every rank, together. Torch, never ray. Sizes are those of nccl-tests' PERFORMANCE.md (and of
raydist/run/telemetry_schema.py), of the whole array: for all_gather and reduce_scatter the parts of all ranks together, for
all_to_all everything that one rank sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from raydist.bench import verify
from raydist.bench.verify import Pattern
from raydist.worker.comm import collectives
from raydist.worker.comm.buckets.measure import slowest
from raydist.worker.distributed import Rank
from raydist.worker.metrics.device_clock import timed
from raydist.worker.precision import DTYPES

_POINT_S = 2.0
"""Time limit for one size: it limits the iterations, to at least one."""


@dataclass(frozen=True, slots=True)
class Row:
    """One operation at one size. Bandwidths in bytes/s, from the median time; `wrong`: wrong elements on all ranks, in both checks.

    `count`: elements as in nccl-tests: of one rank's part for all_gather, reduce_scatter and all_to_all. Times in seconds, of the
    slowest rank in each iteration; `p99` by nearest rank, so the longest time if there are fewer than 100 iterations.
    """

    op: str
    size: int
    count: int
    type: str
    iterations: int
    min: float
    median: float
    p99: float
    algbw: float
    busbw: float
    wrong: int


def bus_factor(op: str, world: int) -> float:
    """busbw / algbw on `world` ranks: bytes on the busiest link per byte of the array. nccl-tests, PERFORMANCE.md.

    Raises KeyError for an operation that is not in raydist.bench.options.OPS.
    """
    share = (world - 1) / world
    factors = {"all_reduce": 2 * share, "broadcast": 1.0, "send_recv": 1.0}
    return {**factors, **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), share)}[op]


def sizes(least: int, most: int, factor: int) -> list[int]:
    """Sizes from `least` bytes up to `most`, each `factor` times the one before."""
    return [least * factor**i for i in range(int(math.log(most / least, factor) + 1e-9) + 1)]


def percentile(times: Sequence[float], share: float) -> float:
    """Percentile by nearest rank: the smallest time that at least this share of them does not exceed."""
    return sorted(times)[max(math.ceil(share * len(times)) - 1, 0)]


def measure(op: str, nbytes: int, dtype: str, rank: Rank, iterations: int) -> Row:
    """One row, the same on every rank. `nbytes` is rounded down to equal parts, with at least one element per rank."""
    made = _Operation(op, nbytes, DTYPES[dtype], rank)
    wrong, first = made.check()
    again = slowest(rank, made.times(1))[0]  # the first call has opened the connections
    count = max(min(iterations, int(_POINT_S / max(min(first, again), 1e-9))), 1)
    times = slowest(rank, made.times(count))
    wrong += made.check()[0]
    median = percentile(times, 0.5)
    algbw = made.size / median
    return Row(
        op, made.size, made.count, dtype, count, min(times), median, percentile(times, 0.99),
        algbw, algbw * bus_factor(op, rank.world_size), wrong,
    )  # fmt: skip


class _Operation:
    """One operation at one size, with its buffers, its input pattern and the expected output."""

    def __init__(self, op: str, nbytes: int, dtype: torch.dtype, rank: Rank) -> None:
        me, world = rank.rank, rank.world_size
        part = max(nbytes // dtype.itemsize // world, 1)
        whole = part * world
        self._rank, self.size = rank, whole * dtype.itemsize
        self.count = part if op in ("all_gather", "reduce_scatter", "all_to_all") else whole

        def empty(n: int) -> torch.Tensor:
            return torch.zeros(n, dtype=dtype, device=rank.device)

        given: Pattern
        expected: Pattern
        match op:
            case "all_reduce":
                self._given = self._got = empty(whole)
                given, expected = verify.term(me, world), verify.total(world)
            case "reduce_scatter":
                self._given, self._got = empty(whole), empty(part)
                given, expected = verify.term(me, world), verify.shifted(me * part, verify.total(world))
            case "all_gather":
                self._given, self._got = empty(part), empty(whole)
                given, expected = verify.message(me, me), verify.block(part, lambda b: verify.message(b, b))
            case "broadcast":
                self._given = self._got = empty(whole)
                given, expected = verify.message(me, me), verify.message(0, 0)
            case "all_to_all":
                self._given, self._got = empty(whole), empty(whole)
                given = verify.block(part, lambda b: verify.message(me, b))
                expected = verify.block(part, lambda b: verify.message(b, me))
            case _:
                self._given, self._got = empty(whole), empty(whole)
                before, after = (me - 1) % world, (me + 1) % world
                given, expected = verify.message(me, after), verify.message(before, me)
        self._pattern, self._expected = given, expected
        self._call: Callable[[], object] = {
            "all_reduce": lambda: dist.all_reduce(self._got),
            "reduce_scatter": lambda: collectives.reduce_scatter(self._got, self._given),
            "all_gather": lambda: collectives.all_gather(self._got, self._given),
            "broadcast": lambda: dist.broadcast(self._got, src=0),
            "all_to_all": lambda: dist.all_to_all_single(self._got, self._given),
            "send_recv": self._around,
        }[op]

    def check(self) -> tuple[int, float]:
        """Calls it once on patterned numbers. Returns (wrong elements on all ranks, seconds of the slowest rank)."""
        if self._got is not self._given:
            self._got.fill_(float("nan"))
        verify.fill(self._given, self._pattern)
        (seconds,) = slowest(self._rank, self._timed(1))
        count = torch.tensor(verify.wrong(self._got, self._expected))
        dist.all_reduce(count, group=self._rank.control)
        return int(count), seconds

    def times(self, count: int) -> list[float]:
        """Seconds of `count` consecutive calls, on zeros: other sums would overflow."""
        self._given.zero_()
        return self._timed(count)

    def _timed(self, count: int) -> list[float]:
        dist.barrier(group=self._rank.control)
        return timed(self._rank.device, self._call, count)

    def _around(self) -> None:
        """Each rank sends to the next one. NCCL needs both directions in one group of calls."""
        me, world = self._rank.rank, self._rank.world_size
        calls = [
            dist.P2POp(dist.isend, self._given, (me + 1) % world),
            dist.P2POp(dist.irecv, self._got, (me - 1) % world),
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
