"""Replicas of the model on all ranks, gradients summed by torch's DistributedDataParallel.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from raydist.errors import GraphMismatch
from raydist.spec import ParallelSpec
from raydist.worker.parallel import Example
from raydist.worker.setup import Rank

# Renamed in torch 2.13.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class Strategy:
    """DDP; on one rank, the model as it is."""

    module: nn.Module

    def __init__(self, spec: ParallelSpec, rank: Rank) -> None:
        self._spec, self._rank = spec, rank
        self.loss_factor = float(rank.world_size)  # DDP's all-reduce averages

    def wrap(self, model: nn.Module, example: Example) -> nn.Module:
        """See `ParallelStrategy.wrap`. Runs `example` twice: for the graph check, and for DDP's buckets."""
        model.to(self._rank.device)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        check_graph(model, example, self._rank)
        self.module = model
        if self._rank.world_size > 1:
            persistent = model.state_dict().keys() - {n for n, _ in model.named_parameters(remove_duplicate=False)}
            # Rotary tables and the like are the same everywhere; running statistics are not.
            sync_buffers: dict[str, Any] = {_SYNC_BUFFERS: bool(persistent)}
            ddp = DistributedDataParallel(
                model,
                device_ids=[self._rank.device.index] if self._rank.device.type == "cuda" else None,
                **sync_buffers,
                gradient_as_bucket_view=True,
                bucket_cap_mb=self._spec.bucket_mb,
            )
            self._settle_buckets(ddp, example)
            self.module = self._ddp = ddp
        for name, b in model.named_buffers():
            b.copy_(buffers[name])
        model.zero_grad(set_to_none=True)
        return self.module

    def _settle_buckets(self, ddp: DistributedDataParallel, example: Example) -> None:
        # DDP groups gradients into other buckets after its first backward. The sum over three or more ranks depends on
        # where a gradient stands in its bucket, so a resumed run's first step would differ in the last bits from the
        # same step of a run that was never stopped. After this no step is a first one.
        example(ddp).backward()  # type: ignore[no-untyped-call]
        ddp.zero_grad(set_to_none=True)

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """See `ParallelStrategy.accumulate`."""
        if last or self._rank.world_size == 1:
            return nullcontext()
        return self._ddp.no_sync()

    def grad_norm(self) -> torch.Tensor:
        """See `ParallelStrategy.grad_norm`: every rank holds the whole gradient, so nothing is sent."""
        return get_total_norm([p.grad for p in self._parameters if p.grad is not None])

    def scale_grads(self, factor: float) -> None:
        """See `ParallelStrategy.scale_grads`."""
        torch._foreach_mul_([p.grad for p in self._parameters if p.grad is not None], factor)


def check_graph(model: nn.Module, example: Example, rank: Rank) -> None:
    """One backward on each rank alone: every parameter must get a gradient, and the same ones on all ranks.

    Otherwise DDP waits for a gradient that never comes, or ranks wait for one another. Raises GraphMismatch on every
    rank. Leaves no gradient behind.
    """
    was_training = model.training
    model.train()
    example(model).backward()  # type: ignore[no-untyped-call]
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    without = [n for n, p in named if p.grad is None]
    signature = [f"{n}{list(p.shape)}:{str(p.dtype).removeprefix('torch.')}" for n, p in named]
    model.zero_grad(set_to_none=True)
    model.train(was_training)
    every: list[tuple[list[str], list[str]]] = [(without, signature)]
    if rank.world_size > 1:
        every = [([], [])] * rank.world_size
        dist.all_gather_object(every, (without, signature), group=rank.control)
    unused_0, signature_0 = every[0]
    for other, (unused, signature) in enumerate(every):
        if signature != signature_0:
            differ = sorted(set(signature) ^ set(signature_0))
            raise GraphMismatch(
                f"rank {other} has other parameters than rank 0: {_some(differ)}",
                "build the same model on every rank: nothing in it may depend on the rank, the host or the time",
            )
        if unused != unused_0:
            raise GraphMismatch(
                f"rank {other} uses other parameters in its loss than rank 0: {_some(sorted(set(unused) ^ set(unused_0)))}",
                "forward must take the same path through the model on every rank",
            )
    if unused_0:
        raise GraphMismatch(
            f"these parameters take no part in the loss: {_some(unused_0)}",
            "use them in forward, remove them, or call requires_grad_(False) on them",
        )


def _some(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
