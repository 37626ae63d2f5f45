"""The passes and the update of a step of the user's loop, through a strategy of raydist/worker/parallel.

Runs in: each rank. The user's code makes the forward passes, so a strategy gets no example of them: the first loss is checked in
its place.

Before anything that waits for other ranks within a pass, all ranks meet: a rank that has left its loop is then named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from raydist.errors import GraphMismatch, TrainingStopped, UsageError, UserError
from raydist.own.arguments import give_shards, splits_state
from raydist.spec import JobSpec
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.distributed import Rank
from raydist.worker.lora import frozen_shards
from raydist.worker.mesh import Mesh
from raydist.worker.parallel import WithoutExample, build
from raydist.worker.parallel._grad_norm import GradNorm
from raydist.worker.parallel._model_graph import check_loss, plain_name, some, whole_parameters
from raydist.worker.parameter_table import gather_parameters
from raydist.worker.step_hooks import Bad

CHANGED = (
    "the script changes gradients between backward() and step(), as clip_grad_norm_ does: there they are sums over the batch's "
    "weights, not means; give the session clip= instead"
)
"""A note of the run."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Of a step, over all ranks: its mean loss, its weight, and the norm of its gradient; `now`: with what the script has changed
    after the backward pass."""

    loss: float
    weight: float
    norm: float
    now: float


class Training:
    """Distributes the model. A collective. `trained`: its parameters, which the optimizer has; `around`: gives a context for each
    backward pass."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        trained: Mapping[str, nn.Parameter],
        spec: JobSpec,
        rank: Rank,
        around: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._around = around
        splits = splits_state(spec.parallel.strategy)
        self._model, self._optimizer, self._rank, self._clip = model, optimizer, rank, spec.optim.clip
        self.mesh = Mesh(rank)
        self._whole, self._splits = not splits, splits and rank.world_size > 1
        if self._splits:
            for p in trained.values():
                p.data = p.data.contiguous()  # rows of it are sent
        self._strategy = cast(WithoutExample, build(spec, self.mesh))
        self._strategy.wrap(model, None)
        self.shards = self._strategy.shards()
        give_shards(optimizer, trained, self.shards)
        self.frozen = frozen_shards(model)
        likes = {name: shard.local if shard.like is None else shard.like for name, shard in self.frozen.items()}
        self.parameters = gather_parameters(self.shards, rank, likes)
        self._norm = GradNorm(self.parameters, rank, dist.group.WORLD if rank.world_size > 1 else None)
        self._summed: tuple[Tensor, list[int]] | None = None
        """If each rank has all gradients, after the last backward pass: the gradient's norm, how often each part was changed."""
        self.changed = False
        """Whether the script has changed the gradients of a step after their last backward pass."""
        kept = model.state_dict().keys()
        self._statistics = [b for name, b in model.named_buffers() if name in kept]
        self._found: dict[Tensor, str] | None = {}
        """Parameters as the first forward pass has them; None: the first loss was checked."""
        self._first = ExitStack()
        self._meets = False
        self._losses: list[tuple[Tensor, float]] = []  # of the step so far, with their weights
        self._step, self._given = 0, False
        self._guard = optimizer.register_step_pre_hook(lambda *_: self._check_update())
        if self._splits:
            model.register_forward_pre_hook(lambda *_: self._before_forward(), prepend=True)

    def begin(self, step: int) -> None:
        """The user's code has a batch."""
        self._step, self._given, self._meets = step, True, self._splits
        if self._found is not None and not self._found:
            self._found = {p: plain_name(n) for n, p in self._model.named_parameters() if p.requires_grad}
            if isinstance(self._model, FSDPModule):
                self._found.clear()
                self._first.enter_context(whole_parameters(self._model, self._find))

    def backward(self, loss: Tensor, weight: float, last: bool) -> None:
        """Adds the gradient of `loss` times `weight`. In the `last` micro-batch of a step gradients are summed over the ranks
        meanwhile, if not before. A collective, but for ddp's other micro-batches."""
        if self._splits or last or self._found is not None:
            self.meet()
        if self._found is not None:
            check_loss(loss, self._found, list(self.shards), self.mesh)
            self._first.close()
            self._found = None
        if self._losses and not self._splits and all(s.local.grad is None for s in self.shards.values()):
            raise UsageError(
                f"step {self._step}: the gradients of its first micro-batches were dropped: optimizer.zero_grad() was called",
                "leave it out: the session does it after each update",
            )
        self._losses.append((loss.detach(), weight))  # not read here: the host would wait for the device
        with self._strategy.accumulate(last), self._around():
            (loss * (weight * self._strategy.loss_factor)).backward()  # type: ignore[no-untyped-call]
        if last and self._whole:  # gradients are summed now, and the script may clip them before step()
            self._summed = self._norm(), self._versions()

    def reduce(self) -> Sums | Bad:
        """Ends the passes of a step: every shard has its gradient, of the sum of all losses. A collective. Bad: on every rank, if
        the loss or the gradient is not finite."""
        device = self._rank.device
        self._given = False
        self._strategy.finish_grads()
        without = [name for name, s in self.shards.items() if s.local.numel() and s.local.grad is None]
        if without:
            raise GraphMismatch(
                f"step {self._step}: on rank {self._rank.rank} these parameters took no part in the loss: {some(without)}",
                "each loss must depend on all parameters that are trained, as the first one did",
            )
        loss = torch.zeros((), dtype=torch.float64, device=device)
        for one, weight in self._losses:
            loss += one.reshape(()).double() * weight
        sums = torch.stack([loss, torch.tensor(sum(w for _, w in self._losses), dtype=torch.float64).to(device)])
        if self._rank.world_size > 1:
            dist.all_reduce(sums)
        before, versions = self._summed or (None, None)
        changed = versions is not None and versions != self._versions()
        now = self._norm() if before is None or changed else before  # enqueued before the host waits for the device
        total, weight = sums.tolist()
        self._losses.clear()
        if not weight:
            raise UserError(f"step {self._step}: the weights of all batches are 0", "give samples or tokens as weight")
        self._summed, self.changed = None, self.changed or changed
        found = Sums(total / weight, weight, float(now if before is None else before) / weight, float(now) / weight)
        if not (math.isfinite(found.loss) and math.isfinite(found.now)):
            mine = {} if math.isfinite(own := float(loss)) else {"rank": self._rank.rank, "loss": own}
            ranks = tuple(filter(None, gather_json(mine, self._rank.control)))
            cause = f"step {self._step}: loss {found.loss}, gradient norm {found.now}"
            return Bad(self._step, found.loss, cause, ranks)
        return found

    def _versions(self) -> list[int]:
        return [s.local.grad._version for s in self.shards.values() if s.local.grad is not None]

    def update(self, sums: Sums) -> None:
        """Clips, and makes the update. A collective."""
        factor = 1.0 / sums.weight
        if self._clip and sums.now > self._clip:
            factor *= self._clip / (sums.now + 1e-6)
        self._strategy.scale_grads(factor)
        self._optimizer.step()
        self._strategy.zero_grad()
        self._strategy.updated()
        if self._rank.world_size > 1:
            self._share_statistics()

    def loaded(self) -> None:
        """Shards have other values, from a checkpoint. A collective."""
        self._strategy.updated()

    def end(self) -> None:
        """Drops gradients of a step that is not ended. Each rank has the newest weights, of those that it holds whole. A
        collective."""
        self._given = False
        self._first.close()
        self._strategy.gather()
        self._strategy.zero_grad()

    def close(self) -> None:
        """The optimizer is the script's again."""
        self._guard.remove()

    def meet(self, leaves: bool = False) -> None:
        """Raises TrainingStopped, on every rank, if some ranks leave their loop here, and others do not. A collective."""
        rank = self._rank
        if rank.world_size == 1:
            return
        left = torch.tensor([float(leaves and r == rank.rank) for r in range(rank.world_size)])
        dist.all_reduce(left, group=rank.control)
        gone = left.nonzero().flatten().tolist()
        if gone and len(gone) < rank.world_size:
            raise TrainingStopped(
                f"step {self._step}: rank {', '.join(map(str, gone))} left its loop, and the others did not",
                "end the loop in the same place on every rank",
            )

    def _check_update(self) -> None:
        if self._given:
            raise UsageError(
                f"step {self._step}: optimizer.step() was called, and the session's step() makes the update",
                "leave out optimizer.step()",
            )

    def _before_forward(self) -> None:
        if self._meets:
            self._meets = False
            self.meet()

    def _find(self, name: str, parameter: Tensor) -> None:
        assert self._found is not None
        self._found[parameter] = name

    def _share_statistics(self) -> None:
        """Running statistics are rank 0's, as with DDP. One broadcast for each dtype."""
        for dtype in dict.fromkeys(b.dtype for b in self._statistics):
            same = [b for b in self._statistics if b.dtype == dtype]
            flat = torch.cat([b.reshape(-1) for b in same])
            dist.broadcast(flat, 0)
            for buffer, sent in zip(same, torch.split(flat, [b.numel() for b in same]), strict=True):
                buffer.copy_(sent.view_as(buffer))
