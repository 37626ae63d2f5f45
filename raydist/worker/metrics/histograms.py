"""Histograms of every weight and gradient: of whole parameters, although a rank may hold a part of some and nothing of others. And
the size of each layer's output in these steps.

Runs in: each train worker, every `observe.histograms` steps, when the step's gradients exist. Torch, never ray.

The buckets are the same for all tensors and steps, so that ranks' counts can be added: a value's sign, exponent and first binary
digit, which are the highest ten bits of a float. Counting is a shift and torch.bincount, 7 ns an element on one CPU core; the ratio
of a bucket's edges is 1.5 or 1.33. All ranks' counts are summed in one all-reduce of 8 KiB a tensor; of the ranks that hold the
same elements one counts them. If rank 0 holds everything, it counts alone and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from raydist.worker.distributed import Rank
from raydist.worker.metrics.activations import ActivationSizes
from raydist.worker.parameter_table import ParameterTable
from raydist.worker.step_hooks import Step, StepHook

BUCKETS = 1024
_SHIFT = 22
_CHUNK = 1 << 22
"""Elements that are counted at a time; each takes 16 bytes of memory."""
_ZERO = 2 * (127 - 40)
"""Buckets of a sign below this index count as zero: magnitudes under 2^-40."""

Say = Callable[..., None]


class Histograms(StepHook):
    """A hook of every step. Every rank has one. `say` is rank 0's: `Reporter.say`. Without `activations` those are not recorded."""

    def __init__(
        self,
        rank: Rank,
        parameters: ParameterTable,
        every: int,
        say: Say | None,
        activations: ActivationSizes | None = None,
    ) -> None:
        self._rank, self._parameters, self._every, self._say = rank, parameters, every, say
        self._activations = activations
        first_has_all = all(parameters[name].holders[0][:1] == (0,) for name in parameters.trained)
        self._split = not first_has_all or any(len(parameters[name].holders) > 1 for name in parameters.trained)

    def begin(self, step: Step) -> None:
        """Of a step that counts also the layers' outputs."""
        if self._activations is not None and self._due(step):
            self._activations.begin()

    def _due(self, step: Step) -> bool:
        return not step.number % self._every and (self._split or self._rank.first)

    @torch.no_grad()
    def before_update(self, step: Step) -> None:
        """Counts in every `every`-th step; a collective if parameters are split over ranks."""
        if not self._due(step):
            return
        outputs = self._activations.end(self._split) if self._activations is not None else {}
        names, shards = self._parameters.trained, self._parameters.shards
        device = next((shard.local.device for shard in shards.values()), self._rank.device)
        made = torch.zeros(2, len(names), BUCKETS + 2, dtype=torch.float64, device=device)
        for i, name in enumerate(names):
            if self._parameters.counts(name):
                local = shards[name].local
                count(local.detach(), 1.0, made[0, i])
                if local.grad is not None:
                    count(local.grad, step.pending_factor, made[1, i])
        if self._split:
            made = made.to(self._rank.device)
            dist.all_reduce(made)
        if self._say is not None:
            weights, gradients = (
                {name: histogram(row) for name, row in zip(names, rows, strict=True)} for rows in made.tolist()
            )
            self._say("histograms", step=step.number, weights=weights, gradients=gradients, activations=outputs)


def count(values: Tensor, factor: float, into: Tensor) -> None:
    """Adds to `into`, [BUCKETS + 2] in float64: the number of elements in each bucket, their sum, and the sum of their squares."""
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
        elif low > edges[-1]:  # the empty buckets in between, as one
            edges.append(low)
            counts.append(0)
        edges.append(high)
        counts.append(int(number))
    return {"edges": edges, "counts": counts, "sum": row[BUCKETS], "sum_squares": row[BUCKETS + 1]}


def _edge(place: int) -> float:
    """The smallest magnitude of a bucket, by its index among the buckets of its sign."""
    return (1.0 + (place % 2) / 2) * 2.0 ** (place // 2 - 127)
