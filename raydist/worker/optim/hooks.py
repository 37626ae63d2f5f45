"""Optimizer methods that the loop calls beyond torch's interface, with defaults for plain optimizers.

Runs in: each train worker. Torch, never ray.

An optimizer whose state or gradients are not on the device of its parameters (worker/optim/offload) defines these four methods; any
other `torch.optim.Optimizer` gets `PlainHooks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast, runtime_checkable

import torch


@runtime_checkable
class OptimizerHooks(Protocol):
    """The order in a step: `prefetch`, `scale_grads` any number of times, `step`. `close` after the last one."""

    def prefetch(self) -> None:
        """Called before the backward pass of the step's last micro-batch."""

    def scale_grads(self, factor: float) -> None:
        """The next update multiplies all gradients by `factor`."""

    @property
    def pending_factor(self) -> float:
        """The factor by which the next update multiplies the gradients that are in `grad` now."""

    def close(self) -> None:
        """Releases threads, memory and files that torch's interface does not cover."""


class PlainHooks:
    """For an optimizer that updates parameters on their device: `scale_grads` scales gradients in place."""

    pending_factor = 1.0

    def __init__(self, scale_grads: Callable[[float], None]) -> None:
        self.scale_grads = scale_grads

    def prefetch(self) -> None:
        """Nothing to prefetch."""

    def close(self) -> None:
        """Nothing to release."""


def hooks_of(optimizer: torch.optim.Optimizer, scale_grads: Callable[[float], None]) -> OptimizerHooks:
    """The optimizer's own hooks, or the plain ones. `scale_grads`: the strategy's, in place."""
    if isinstance(optimizer, OptimizerHooks):
        return optimizer
    return cast(OptimizerHooks, PlainHooks(scale_grads))
