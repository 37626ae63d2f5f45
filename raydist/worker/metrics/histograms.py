"""Histograms of every weight and gradient, of the whole parameter whatever part of it a rank holds.

Runs in: each train worker, every `observe.histograms` steps, once a step's gradients are there. Torch, never ray.

The buckets are the same for all tensors and steps, so that ranks' counts add up: a value's sign, exponent and first binary digit,
which are the uppermost ten bits of a float. So counting is a shift and torch.bincount, 7 ns an element on one CPU core;
and a bucket's edges are 1.5 or 1.33 apart. All ranks' counts are summed in one all-reduce of 8 KiB a tensor; ranks that hold the
same rows count them once. Where every rank holds all, rank 0 counts alone and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from raydist.worker.distributed import Rank
from raydist.worker.parallel import ParamShard

BUCKETS = 1024
_SHIFT = 22
_CHUNK = 1 << 22
"""Elements that are counted at a time: they take 16 bytes each meanwhile."""
_ZERO = 2 * (127 - 40)
"""Places of a sign's buckets below this one count as zero: magnitudes under 2^-40."""

Say = Callable[..., None]


class Histograms:
    """Every rank has one. `say` is rank 0's: `Reporter.say`."""

    def __init__(self, rank: Rank, shards: Mapping[str, ParamShard], every: int, say: Say | None) -> None:
        self._rank, self._shards, self._every, self._say = rank, shards, every, say
        self._split = any(shard.like is not None for shard in shards.values())

    @torch.no_grad()
    def look(self, step: int, pending: float = 1.0) -> None:
        """Every rank, before the update of `step`; the others wait for none. `pending`: what the gradients are yet to be times."""
        if step % self._every or not (self._split or self._rank.first):
            return
        device = next(iter(self._shards.values())).local.device
        made = torch.zeros(2, len(self._shards), BUCKETS + 2, dtype=torch.float64, device=device)
        for i, shard in enumerate(self._shards.values()):
            if _counts_once(self._rank, shard.like):
                count(shard.local.detach(), 1.0, made[0, i])
                if shard.local.grad is not None:
                    count(shard.local.grad, pending, made[1, i])
        if self._split:
            made = made.to(self._rank.device)
            dist.all_reduce(made)
        if self._say is not None:
            weights, gradients = (
                {name: histogram(row) for name, row in zip(self._shards, rows, strict=True)} for rows in made.tolist()
            )
            self._say("histograms", step=step, weights=weights, gradients=gradients)


def count(values: Tensor, factor: float, into: Tensor) -> None:
    """Adds to `into`, [BUCKETS + 2] in float64, how many elements fall into each bucket, their sum, and that of their squares."""
    for chunk in torch.split(values.reshape(-1), _CHUNK):
        chunk = chunk.float() * factor if factor != 1.0 else chunk.float()
        bucket = (chunk.view(torch.int32) >> _SHIFT) & (BUCKETS - 1)
        into[:BUCKETS] += torch.bincount(bucket, minlength=BUCKETS)
        into[BUCKETS] += chunk.sum(dtype=torch.float64)
        into[BUCKETS + 1] += chunk.square().sum(dtype=torch.float64)


def histogram(row: list[float]) -> dict[str, Any]:
    """`count`'s row as plain values: `edges`, ascending, one more than `counts`; `sum`, `sum_squares`. Empty ends are left out."""
    half = BUCKETS // 2
    places = range(_ZERO, half)
    found = [(-_edge(p + 1), -_edge(p), row[half + p]) for p in reversed(places)]
    found += [(-_edge(_ZERO), _edge(_ZERO), sum(row[:_ZERO]) + sum(row[half : half + _ZERO]))]
    found += [(_edge(p), _edge(p + 1), row[p]) for p in places]
    edges: list[float] = []
    counts: list[int] = []
    for low, high, number in found:
        if not number:
            continue
        if not edges:
            edges = [low]
        elif low > edges[-1]:  # all that is empty in between, as one bucket
            edges.append(low)
            counts.append(0)
        edges.append(high)
        counts.append(int(number))
    return {"edges": edges, "counts": counts, "sum": row[BUCKETS], "sum_squares": row[BUCKETS + 1]}


def _edge(place: int) -> float:
    """The smallest magnitude of a bucket, by its place among those of its sign."""
    return (1.0 + (place % 2) / 2) * 2.0 ** (place // 2 - 127)


def _counts_once(rank: Rank, like: DTensor | None) -> bool:
    """Whether this rank is the one to count its rows, of all that hold them."""
    if like is None:
        return rank.first
    at = like.device_mesh.get_coordinate()
    assert at is not None, "every rank is in the mesh"
    return all(at[d] == 0 for d, placement in enumerate(like.placements) if placement.is_replicate())
