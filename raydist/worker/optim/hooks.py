"""What the loop asks of an optimizer beyond torch's interface, and the answers for optimizers that need nothing of it.

Runs in: each train worker. Torch, never ray.

An optimizer whose state or gradients are elsewhere than its parameters (worker/optim/offload) has these four itself; any other
`torch.optim.Optimizer` gets `PlainHooks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast, runtime_checkable

import torch


@runtime_checkable
class OptimizerHooks(Protocol):
    """The order in a step: `prefetch`, `scale_grads` any number of times, `step`. `close` after the last one."""

    def prefetch(self) -> None:
        """The backward pass of the step's last micro-batch is about to begin."""
        ...

    def scale_grads(self, factor: float) -> None:
        """The next update multiplies all gradients by `factor`."""
        ...

    @property
    def pending_factor(self) -> float:
        """What the next update multiplies the gradients by, as they are in `grad` now."""
        ...

    def close(self) -> None:
        """Releases threads, memory and files that torch's interface knows nothing of."""
        ...


class PlainHooks:
    """For an optimizer that updates parameters where they are: gradients are scaled in place, by `scale_grads`."""

    pending_factor = 1.0

    def __init__(self, scale_grads: Callable[[float], None]) -> None:
        self.scale_grads = scale_grads

    def prefetch(self) -> None:
        """Nothing is elsewhere."""

    def close(self) -> None:
        """Nothing is held."""


def hooks_of(optimizer: torch.optim.Optimizer, scale_grads: Callable[[float], None]) -> OptimizerHooks:
    """The optimizer's own hooks, or the plain ones. `scale_grads`: the strategy's, in place."""
    if isinstance(optimizer, OptimizerHooks):
        return optimizer
    return cast(OptimizerHooks, PlainHooks(scale_grads))
