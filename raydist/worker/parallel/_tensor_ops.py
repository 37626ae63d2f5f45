"""What tensor parallel ranks send to each other in a pass: the sequence gathered, partial sums added up, and their gradients.

Runs in: each train worker. Torch, never ray.

Plain tensors and autograd Functions: DTensor's dispatch of the same work took 2.5 times the processor time. Each operation and its
gradient are one collective of the tensor group. Sums are added in the order of the ranks, in fp32, so that two runs have the same
bits, and so do all ranks. torch.compile ends a graph here: it cannot trace messages from rank to rank.

Shape suffixes: B sequences, T tokens, S tokens of this rank (T / W), D width, V vocabulary, W ranks of the tensor group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from raydist.data.batches import MASKED
from raydist.worker.comm import gloo_p2p

Op = TypeVar("Op", bound=Callable[..., Tensor])


def _no_graph(op: Op) -> Op:
    return torch.compiler.disable(op)  # type: ignore[no-untyped-call]


@_no_graph
def gather_sequence(x_BSD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' tokens, BTD. Backward adds up the ranks' gradients of this rank's tokens.

    Under autocast values are sent in its format, in which a projection takes them anyway; gradients are sent as they are.
    """
    device = x_BSD.device.type
    sent = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_BSD.dtype
    made: Tensor = _GatherSequence.apply(x_BSD, group, sent)  # type: ignore[no-untyped-call]
    return made


@_no_graph
def sum_sequence(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of all ranks' tensors at this rank's tokens, BSD. Backward gathers the gradients of all tokens."""
    made: Tensor = _SumSequence.apply(x_BTD, group)  # type: ignore[no-untyped-call]
    return made


@_no_graph
def gather_vocabulary(logits_BTV: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """All ranks' columns side by side; `sizes` says how many each has. Backward takes this rank's columns of the gradient, which
    must be the same on all ranks."""
    made: Tensor = _GatherVocabulary.apply(logits_BTV, sizes, group)  # type: ignore[no-untyped-call]
    return made


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """The part of a vocabulary whose logits this rank computes: from `first` on. `most`: of any rank's part."""

    group: dist.ProcessGroup
    first: int
    most: int


@_no_graph
def vocabulary_loss(logits_NV: Tensor, targets_N: Tensor, shard: VocabularyShard) -> Tensor:
    """Cross entropy in nats, summed over the targets that are not MASKED, of logits whose columns are spread over the ranks: a
    scalar in fp32, the same on all ranks. Two all-reduces of one and of two numbers a token; none in backward."""
    loss: Tensor = _VocabularyLoss.apply(logits_NV, targets_N, shard)  # type: ignore[no-untyped-call]
    return loss


def vocabulary_loss_and_gradient(logits_NV: Tensor, targets_N: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """See `vocabulary_loss`; and the gradient with respect to this rank's logits, in fp32."""
    wide_NV = logits_NV.float()
    top_N = wide_NV.amax(dim=1) if wide_NV.shape[1] else wide_NV.new_full(targets_N.shape, -torch.inf)
    dist.all_reduce(top_N, dist.ReduceOp.MAX, group=shard.group)
    columns_V = torch.arange(wide_NV.shape[1], device=wide_NV.device)
    at_target_NV = columns_V == (targets_N - shard.first)[:, None]
    shifted_NV = wide_NV - top_N[:, None]
    target_N = (shifted_NV * at_target_NV).sum(dim=1)  # one rank has it, the others have zeros
    powers_NV = shifted_NV.exp_()
    sums = torch.stack([powers_NV.sum(dim=1), target_N])
    dist.all_reduce(sums, group=shard.group)
    counts_N = targets_N != MASKED
    loss = ((sums[0].log() - sums[1]) * counts_N).sum()
    gradient_NV = powers_NV.div_(sums[0][:, None]).sub_(at_target_NV.float())
    return loss, gradient_NV.mul_(counts_N[:, None])


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, group: dist.ProcessGroup, sent: torch.dtype) -> Tensor:
        ctx.group = group
        return _gathered(x_BSD.to(sent), group).to(x_BSD.dtype)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        return _summed(above[0], ctx.group), None, None


class _SumSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(x_BTD, group)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered(above[0], ctx.group), None


class _GatherVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_BTV: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        rank = dist.get_rank(group)
        ctx.columns = sum(sizes[:rank]), sum(sizes[: rank + 1])
        padded = F.pad(logits_BTV, (0, max(sizes) - logits_BTV.shape[-1]))
        every = _every(padded, group)
        return torch.cat([part[..., :size] for part, size in zip(every, sizes, strict=True)], dim=-1)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        first, last = ctx.columns
        return above[0][..., first:last], None, None


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, shard: VocabularyShard) -> Tensor:
        loss, gradient_NV = vocabulary_loss_and_gradient(logits_NV, targets_N, shard)
        ctx.save_for_backward(gradient_NV)
        ctx.format = logits_NV.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_NV,) = ctx.saved_tensors
        return (gradient_NV * above[0]).to(ctx.format), None, None


def _gathered(x_BSD: Tensor, group: dist.ProcessGroup) -> Tensor:
    every_WBSD = _every(x_BSD, group)
    return every_WBSD.transpose(0, 1).reshape(x_BSD.shape[0], -1, x_BSD.shape[2])


def _every(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' tensors of the same shape, stacked."""
    every = x.new_empty(dist.get_world_size(group), *x.shape)
    gloo_p2p.all_gather_now(every.view(-1), x.contiguous().view(-1), group)
    return every


def _summed(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = dist.get_world_size(group)
    batch, tokens, width = x_BTD.shape
    sent_WBSD = x_BTD.view(batch, size, tokens // size, width).transpose(0, 1).contiguous()
    parts_WBSD = torch.empty_like(sent_WBSD)
    # As many bytes as a reduce-scatter, and the sum is in fp32 and in the order of the ranks.
    gloo_p2p.all_to_all_now(parts_WBSD, sent_WBSD, group)
    return parts_WBSD.sum(dim=0, dtype=torch.float32).to(x_BTD.dtype)
