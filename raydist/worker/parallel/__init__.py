"""How the work is split over the ranks: one strategy a file, found by its name.

A strategy's file (or the user's `package.module:attribute`) has a class `Strategy`. The loop calls it in this order:

    strategy = Strategy(spec.parallel, rank)
    module = strategy.wrap(model, example)         # every rank, once; checks the graph; no trace stays in the weights
    with strategy.accumulate(last=True): ...       # around each micro-batch's forward and backward
    norm = strategy.grad_norm()                    # after the last backward: the global norm, the same on every rank
    strategy.scale_grads(factor)

The loop divides by the tokens of the global batch, so reduced gradients must be sums over the ranks, never means: a
strategy whose reduction averages says so in `loss_factor`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from raydist.spec import ParallelSpec
from raydist.worker.setup import Rank

Example = Callable[[nn.Module], torch.Tensor]
"""Runs forward on a batch of the right shape and gives the loss: what `wrap` needs to look at the graph."""


class ParallelStrategy(Protocol):
    """What a file in this folder has, under the name `Strategy`."""

    module: nn.Module
    """What forward is called on."""

    loss_factor: float
    """Each rank's loss is multiplied by it before backward: the world size where the reduction averages, else 1."""

    def __init__(self, spec: ParallelSpec, rank: Rank) -> None: ...

    def wrap(self, model: nn.Module, example: Example) -> nn.Module:
        """Moves the model to its device and makes it distributed. Raises GraphMismatch, naming parameters and ranks."""
        ...

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Around one micro-batch: gradients are reduced over the ranks only in the `last` one of a step."""
        ...

    def grad_norm(self) -> torch.Tensor:
        """The L2 norm of the whole gradient, a scalar, the same on every rank."""
        ...

    def scale_grads(self, factor: float) -> None:
        """Multiplies the gradients in place."""
        ...
