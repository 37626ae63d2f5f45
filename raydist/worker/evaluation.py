"""The loss over held-out batches: forward passes of all ranks, each over its own part.

Runs in: each train worker. Torch, never ray. All ranks call `evaluate` together.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge

from raydist.data.batches import MASKED, MicroBatch
from raydist.ipc.heartbeat import Heartbeat
from raydist.worker.loss import Loss, call_model, unwrapped
from raydist.worker.loss.cross_entropy import loss_sum
from raydist.worker.mesh import Mesh
from raydist.worker.parallel import ParallelStrategy
from raydist.worker.parts import Parts, add_loss
from raydist.worker.precision import Precision


class _Evaluation:
    """Passes over held-out batches. See `raydist.worker.parallel.Work`."""

    trains = False

    def __init__(self, mesh: Mesh, precision: Precision, heartbeat: Heartbeat, loss: Loss, parts: Parts | None) -> None:
        self._mesh, self._precision, self._heartbeat, self._loss = mesh, precision, heartbeat, loss
        self._parts = parts
        zeros = [0.0, 0.0] if parts is None else parts.spread([0.0, 0.0])
        self.sums = torch.tensor(zeros, dtype=torch.float64, device=mesh.rank.device)
        """Of the loss, or of each part's, and of its tokens."""

    def around(self, index: int) -> AbstractContextManager[None]:
        self._heartbeat.enter("eval")
        return nullcontext()

    def forward(self, module: nn.Module, index: int, batch: MicroBatch, part: bool = False) -> torch.Tensor:
        with self._precision.autocast():
            if part:
                return call_model(module, batch)
            loss = self._loss(module, batch)
        if self._mesh.counts:
            add_loss(self.sums, loss, self._parts)
            self.sums[-1] += (batch.targets != MASKED).sum()
        return loss

    def backward(self, index: int, made: torch.Tensor | GradientEdge, grad: torch.Tensor | None = None) -> None:
        raise AssertionError("an evaluation has no backward pass")


@torch.no_grad()
def evaluate(
    mesh: Mesh,
    strategy: ParallelStrategy,
    precision: Precision,
    batches: Sequence[MicroBatch],
    heartbeat: Heartbeat | None = None,
    loss: Loss = loss_sum,
) -> tuple[float, int]:
    """(mean loss in nats, tokens) over the held-out batches of all ranks, each of which brings its own part."""
    module = unwrapped(strategy.module)
    was_training = module.training
    module.eval()
    parts = strategy.parts
    work = _Evaluation(mesh, precision, heartbeat or Heartbeat(), loss, parts)
    strategy.passes(batches, work)
    module.train(was_training)
    if mesh.rank.world_size > 1:
        dist.all_reduce(work.sums)
    sums: list[float] = work.sums.tolist()
    total, tokens = sums if parts is None else parts.joined(sums)
    return total / max(tokens, 1.0), int(tokens)
