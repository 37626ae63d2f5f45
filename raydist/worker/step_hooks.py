"""What else happens in a step: the points at which `TrainStep` calls its hooks, in the order of their list.

Runs in: each train worker. Torch, never ray. Every rank has the same hooks in the same order, so a hook may use collectives.

    begin                 before the first forward pass
    around_micro_batch    around one micro-batch's forward and backward pass
    before_forward        before its forward pass; in a pipeline before that of each stage of this rank
    around_backward       around its backward pass
    gradients_ready       loss and gradients are summed over the ranks, and not clipped
    find_bad              may forbid the update
    recompute             may have the passes run again, from `begin`
    leave_out             the update is forbidden: raises, or leaves the step out
    before_update         the gradients have their last values, and the optimizer is about to run
    updated               the optimizer has run
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from raydist.data.batches import MicroBatch


@dataclass(slots=True)
class Step:
    """One step as its hooks see it. The last ones are known from `gradients_ready` on, and are the same on every rank but for
    `factor`, `own_norm` and `own_tokens` where replicas train apart.

    `samples`: sequences of the global batch. `loss`: mean over the global batch's `tokens`, in nats. `grad_norm`: of
    the gradient of that mean, before clipping. `factor`: what turns the gradients as they are now into the gradient of that mean.
    `loss_factor`: what the loss of a micro-batch is multiplied by before its backward pass.
    `pending_factor`: what the optimizer will yet multiply the gradients by (see `OptimizerHooks`), known in `before_update`.
    Where replicas train apart (`comm.every`), a replica's gradient is that of the mean over its `own_tokens`, with `own_norm`, and
    `grad_norm` is the mean over the replicas. Else both are those of the global batch.
    """

    number: int
    micro_batches: Sequence[MicroBatch]
    samples: int = 0
    loss_factor: float = 1.0
    loss: float = field(default=float("nan"), init=False)
    grad_norm: float = field(default=float("nan"), init=False)
    own_norm: float = field(default=float("nan"), init=False)
    own_tokens: int = field(default=0, init=False)
    tokens: int = field(default=0, init=False)
    factor: float = field(default=1.0, init=False)
    overflow: bool = field(default=False, init=False)
    """Whether fp16's gradients overflowed: the loss scale is lowered, and no update is made."""
    pending_factor: float = field(default=1.0, init=False)


@dataclass(frozen=True, slots=True)
class Bad:
    """Why a step's update is forbidden; the same on every rank.

    `ranks`: of each rank where it shows its `rank`, its `loss` or its `parameters` (those whose gradient is not finite, the first
    in backward first, five at most), and its `micro_batch`. `median`: of the losses before, if this one's is a spike.
    """

    step: int
    loss: float
    cause: str
    ranks: tuple[dict[str, Any], ...] = ()
    median: float | None = None

    @property
    def hint(self) -> str:
        """What to look at."""
        if self.median is not None:
            return "look at the learning rate and the data of this step"
        return "look at the learning rate, the data of this step, and the model's own divisions, logs and square roots"


class StepHook:
    """Does nothing at any point. A hook overrides what it needs."""

    def begin(self, step: Step) -> None:
        """A step begins, or begins again."""

    def around_micro_batch(self, step: Step, index: int) -> AbstractContextManager[None]:
        """Around the forward and backward pass of `step.micro_batches[index]`."""
        return nullcontext()

    def before_forward(self, step: Step, index: int) -> None:
        """Before a forward pass of `step.micro_batches[index]`, also if it is repeated to find the cause of bad numbers."""

    def around_backward(self, index: int) -> AbstractContextManager[None]:
        """Around a backward pass of that micro-batch. In a pipeline passes of others may come before it, after its forward pass."""
        return nullcontext()

    def gradients_ready(self, step: Step) -> None:
        """Each shard's `local.grad` has the sum over all ranks."""

    def find_bad(self, step: Step) -> Bad | None:
        """Why this step, whose loss and gradient are finite, must not be applied; else None. The same on every rank."""
        return None

    def recompute(self, step: Step, suspect: bool) -> bool:
        """Whether the gradients are of no use, and the passes are to run again. `suspect`: the step's numbers are bad."""
        return False

    def leave_out(self, bad: Bad) -> bool:
        """Raises what stops the run or the attempt, or returns True if the run goes on without this update."""
        return False

    def before_update(self, step: Step) -> None:
        """Every rank, before the optimizer changes weights."""

    def updated(self, step: Step) -> None:
        """The optimizer has changed the weights."""


class BeforeUpdate(StepHook):
    """Calls a function before each update."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def before_update(self, step: Step) -> None:
        """See `StepHook.before_update`."""
        self._function()
