"""Measures the line of an all-reduce and the time of real passes, with all ranks, in the run's own group.

Runs in: each train worker, every rank, before training. Torch, never ray. All ranks get the same figures: the slowest rank's.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn

from raydist.spec import JobSpec
from raydist.worker import model_transforms
from raydist.worker.comm import groups
from raydist.worker.comm.buckets.model import AlphaBeta, Arrival, fit
from raydist.worker.distributed import Rank
from raydist.worker.mesh import Mesh
from raydist.worker.metrics.device_clock import Marks, timed
from raydist.worker.parallel import Example
from raydist.worker.parallel.ddp import Strategy
from raydist.worker.parts import Parts

_SIZES = (2**18, 2**19, 2**20, 2**21, 2**23, 2**25)
"""Bytes, in the range of bucket sizes. Smaller messages do not predict the time of a bucket, because links buffer short bursts."""
_LEAST = 4
_BUDGET_S = 0.5
_EACH_S = 0.04
_PASSES = 3
LONG_S = 5.0
"""Passes are repeated within twice this time: of one that takes longer there are one or two measurements, which noise hardly
changes."""


def slowest(rank: Rank, seconds: list[float]) -> list[float]:
    """The maximum of each time over the ranks. Every rank."""
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=rank.control)
    return times.tolist()


def all_reduce_line(rank: Rank) -> AlphaBeta:
    """The time of an all-reduce of n bytes in this group. Takes half a second; on a slow link, four all-reduces of 2 MiB."""
    points, spent = [], 0.0
    for i, size in enumerate(_SIZES):
        buffer = torch.zeros(size // 4, device=rank.device)
        (first,) = slowest(rank, _all_reduces(rank, buffer, 1))
        times = slowest(rank, _all_reduces(rank, buffer, min(max(int(_EACH_S / max(first, 1e-6)), 3), 20)))
        points += [(size, seconds) for seconds in times]
        spent += first + sum(times)
        if i + 1 >= _LEAST and spent + 8 * statistics.median(times) > _BUDGET_S:  # the next one is four times as large
            break
    return fit(points)


def _all_reduces(rank: Rank, buffer: torch.Tensor, count: int) -> list[float]:
    dist.barrier(group=rank.control)
    return timed(rank.device, lambda: dist.all_reduce(buffer), count)


@dataclass(frozen=True, slots=True)
class Passes:
    """Forward and backward of one micro-batch under ddp. `synced_s`: with the sum over the ranks; the others without.

    Both take turns: a machine that other work slows down for seconds slows down both, not one of them alone. `arrivals`: the times
    of this rank's gradients, in order of time.
    """

    synced_s: float
    pass_s: float
    backward_s: float
    arrivals: tuple[Arrival, ...]


def passes(
    spec: JobSpec, rank: Rank, bucket_mb: float | None, build: Callable[[], nn.Module], example: Example
) -> Passes:
    """Runs passes on a separate model, which is then dropped. Of the run's state it changes only the random generators, which the
    loop seeds before it builds its model, and again before the first step. Groups that it makes are used again.
    """
    with groups.lent():
        made = _passes(spec, rank, bucket_mb, build, example)
    gc.collect()  # DDP and its module refer to each other: the trial's model would stay in memory
    return made


def _passes(
    spec: JobSpec, rank: Rank, bucket_mb: float | None, build: Callable[[], nn.Module], example: Example
) -> Passes:
    strategy = Strategy(spec.with_fields({"parallel.bucket_mb": bucket_mb}), Mesh(rank))
    if spec.train.virtual_ranks is not None:
        unit = spec.parallel.replicas_with_experts
        strategy.parts = Parts(spec.train.virtual_ranks, rank.rank, rank.world_size, unit=unit)
    model = build()
    strategy.wrap(model, example)
    model_transforms.prepare(model, spec.train)
    came = Marks(rank.device)

    def one(last: bool) -> list[float]:
        """Seconds of forward and of backward."""
        for reducer in strategy.reducers():
            reducer.begin(1.0)
        if strategy.parts is not None:
            _begin(strategy, strategy.parts, trained, last)
        marks = Marks(rank.device)
        dist.barrier(group=rank.control)
        with strategy.accumulate(last):
            marks.mark()
            loss = example(strategy.module, samples=spec.train.micro_batch)
            marks.mark()
            came.mark()
            loss.backward()  # type: ignore[no-untyped-call]
            marks.mark()
        strategy.zero_grad()
        return marks.seconds()

    def timed_gradients() -> tuple[list[float], tuple[Arrival, ...]]:
        """A pass without the sum; and when each gradient was complete."""
        nonlocal came
        came, sizes = Marks(rank.device), list[int]()

        def arrived(parameter: torch.Tensor) -> None:
            came.mark()
            sizes.append(parameter.numel() * parameter.element_size())

        handles = [p.register_post_accumulate_grad_hook(arrived) for p in trained]  # type: ignore[no-untyped-call]
        seconds = one(last=False)
        for handle in handles:
            handle.remove()
        return seconds, tuple(Arrival(n, at) for n, at in zip(sizes, accumulate(came.seconds()), strict=True))

    trained = [p for p in model.parameters() if p.requires_grad]
    one(last=True)  # caches and allocators warm up
    alone, synced, spent = list[list[float]](), list[float](), 0.0
    while len(synced) < _PASSES and spent < 2 * LONG_S:
        seconds, arrivals = timed_gradients()
        alone.append(slowest(rank, seconds))
        synced.append(sum(slowest(rank, one(last=True))))
        spent += sum(alone[-1]) + synced[-1]
    forward_s, backward_s = (statistics.median(times) for times in zip(*alone, strict=True))
    return Passes(statistics.median(synced), forward_s + backward_s, backward_s, arrivals)


def _begin(strategy: Strategy, parts: Parts, trained: Sequence[nn.Parameter], last: bool) -> None:
    """The pass that follows is that of this rank's first part, or of its last: then those before have gradients, of zeros."""
    count = len(parts.own)
    for index in range(count - 1 if last else 0):
        parts.enter(index, count)
        with strategy.accumulate(last=False):
            for p in trained:
                p.grad = torch.zeros_like(p)
    parts.enter(count - 1 if last else 0, count)
