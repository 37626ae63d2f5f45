"""How the work is split over the ranks: one strategy a file, found by its name.

A strategy's file (or the user's `package.module:attribute`) has a class `Strategy`. The loop calls it in this order:

    strategy = Strategy(spec, rank)
    module = strategy.wrap(model, example)         # every rank, once; checks the graph; no trace stays in the weights
    optimizer = optim.build(strategy.shards(), ...)
    with strategy.accumulate(last=True): ...       # around each micro-batch's forward and backward
    norm = strategy.grad_norm()                    # after the last backward: the global norm, the same on every rank
    strategy.scale_grads(factor)
    optimizer.step()
    strategy.zero_grad()
    strategy.updated()                             # what other ranks hold of the old weights is stale

A strategy may also have `messages() -> list[(kind, elements, name)]`: the collectives of a step, in the order in which it issues
them, with the elements that a rank puts in. `raydist trace` gives them these names (docs/trace.md).

The loop divides by the tokens of the global batch, so reduced gradients must be sums over the ranks, never means: a
strategy whose reduction averages says so in `loss_factor`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from raydist.spec import JobSpec
from raydist.worker.distributed import Rank


class Example(Protocol):
    """Runs forward on so many samples of the right shape and gives the loss: what `wrap` needs to look at the graph."""

    def __call__(self, module: nn.Module, samples: int = 1) -> torch.Tensor:
        """The sum of their losses."""
        ...


@dataclass(frozen=True, slots=True)
class ParamShard:
    """What of one parameter this rank's optimizer updates: all of it, or some of its rows.

    `local`: a plain parameter in the memory of the model's own; its gradient is there once `grad_norm` has been called.
    `like`: for rows, a DTensor of the whole parameter, which says whose rows they are; None where `local` is the whole.
    """

    local: nn.Parameter
    like: DTensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Of the whole parameter."""
        return self.local.shape if self.like is None else self.like.shape

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """A tensor that goes with `local` (a moment of the optimizer) as the part of a whole that it is. No copy, no collective."""
        if self.like is None or local.shape != self.local.shape:
            return local
        meta = TensorMeta(self.like.shape, self.like.stride(), local.dtype)
        spec = DTensorSpec(self.like.device_mesh, self.like.placements, tensor_meta=meta)
        # Not `from_local`, which would move a moment in host memory to the mesh's device.
        return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def replicas(like: torch.Tensor | None, world_size: int) -> tuple[tuple[int, ...], ...]:
    """All ranks, in groups that hold the same of this tensor: a plain one is the same on all, a DTensor on those along the mesh
    dimensions that replicate it."""
    if not isinstance(like, DTensor):
        return (tuple(range(world_size)),)
    ranks, placements = like.device_mesh.mesh, like.placements
    split = [d for d, p in enumerate(placements) if not p.is_replicate()]
    kept = [d for d, p in enumerate(placements) if p.is_replicate()]
    parts = math.prod(ranks.shape[d] for d in split)
    return tuple(tuple(sorted(group)) for group in ranks.permute(*split, *kept).reshape(parts, -1).tolist())


class ParallelStrategy(Protocol):
    """What a file in this folder has, under the name `Strategy`."""

    module: nn.Module
    """What forward is called on."""

    takes_meta: bool
    """Whether `wrap` wants a model without weights, on the meta device, if its `build` has `takes_meta`: see the models."""

    loss_factor: float
    """Each rank's loss is multiplied by it before backward: the world size where the reduction averages, else 1."""

    on_final: Callable[[Sequence[torch.Tensor]], None] | None
    """Called, if set, in the last micro-batch's backward with shards' `local`s whose gradient has its last value but for
    scaling, on the stream that made it. A strategy may know of some only, or of none, before `grad_norm`."""

    def __init__(self, spec: JobSpec, rank: Rank) -> None: ...

    def wrap(self, model: nn.Module, example: Example) -> nn.Module:
        """Moves the model to its device and makes it distributed. Raises GraphMismatch, naming parameters and ranks."""
        ...

    def shards(self) -> Mapping[str, ParamShard]:
        """What this rank's optimizer updates, by the names of the plain model's `named_parameters`, in their order."""
        ...

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """Around one micro-batch. In the `last` one of a step the gradients become those of all ranks, if they are not already."""
        ...

    def grad_norm(self) -> torch.Tensor:
        """The L2 norm of the whole gradient, a scalar, the same on every rank. Afterwards every shard has its gradient."""
        ...

    def scale_grads(self, factor: float) -> None:
        """Multiplies the gradients in place."""
        ...

    def zero_grad(self) -> None:
        """Drops all gradients."""
        ...

    def updated(self) -> None:
        """The shards have new values, from an update or a checkpoint: the next forward pass must see them on all ranks."""
        ...
