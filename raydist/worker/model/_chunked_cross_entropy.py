"""The cross entropy of an output head, without all its logits at once: they are the largest tensor of a small model.

Runs in: each train worker. Torch, never ray.

With a vocabulary of 50,304 the logits of 16,384 tokens are 1.6 GB in bf16, and cross entropy creates three tensors of 3.3 GB from
them in fp32. Here logits, loss and gradient are computed chunk by chunk of the tokens, and only the gradients of the head's input
and weight are kept. The result is that of plain cross entropy except for rounding: gradients are multiplied by the incoming
gradient after the products and not before them, and the weight's gradient is summed over chunks in fp32.

Shape suffixes: N tokens of all sequences, C tokens of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raydist.data.batches import MASKED
from raydist.worker.parallel._tensor_ops import VocabularyShard, vocabulary_loss, vocabulary_loss_and_gradient

LOGITS = 1 << 28
"""Maximum of logits per chunk: 1 GiB in fp32. Each chunk reads and writes the weight's gradient once, so do not make it small."""


def head_loss(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, shard: VocabularyShard | None = None) -> Tensor:
    """Cross entropy in nats of the logits `x @ weight.T`, summed over the targets that are not MASKED: a scalar in fp32.

    Under autocast the products use its format. `shard`: the weight has this rank's part of the vocabulary; every rank of its group
    gives all of x and the targets, gets the whole loss, and the gradient of x by its own logits.
    """
    device = x_ND.device.type
    narrow = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_ND.dtype
    if narrow is torch.float16:  # because of its range, the products must include the loss scale
        return _plain_loss(F.linear(x_ND, weight_VD), targets_N, shard)
    if torch.is_grad_enabled():
        loss: Tensor = _HeadLoss.apply(x_ND, weight_VD, targets_N, narrow, shard)  # type: ignore[no-untyped-call]
        return loss
    loss = torch.zeros((), device=x_ND.device)
    for x_CD, targets_C in _chunks(x_ND, weight_VD, targets_N, shard):
        loss = loss + _plain_loss(F.linear(x_CD, weight_VD), targets_C, shard)
    return loss


def _plain_loss(logits_CV: Tensor, targets_C: Tensor, shard: VocabularyShard | None) -> Tensor:
    if shard is not None:
        return vocabulary_loss(logits_CV, targets_C, shard)
    return F.cross_entropy(logits_CV.float(), targets_C, ignore_index=MASKED, reduction="sum")


def _chunks(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, shard: VocabularyShard | None
) -> list[tuple[Tensor, Tensor]]:
    """Chunks of nearly the same size: a short last chunk would cost a separate product. As many on each rank of a group."""
    columns = weight_VD.shape[0] if shard is None else shard.most
    count = max(1, -(-x_ND.shape[0] * columns // LOGITS))
    return list(zip(x_ND.chunk(count), targets_N.chunk(count), strict=True))


def _loss_and_gradient(logits_CV: Tensor, targets_C: Tensor, shard: VocabularyShard | None) -> tuple[Tensor, Tensor]:
    """The summed loss of a chunk, and its gradient with respect to the logits, in their format."""
    if shard is not None:
        loss, gradient_CV = vocabulary_loss_and_gradient(logits_CV, targets_C, shard)
        return loss, gradient_CV.to(logits_CV.dtype)
    logs_CV = F.log_softmax(logits_CV.float(), dim=-1)
    loss = F.nll_loss(logs_CV, targets_C, ignore_index=MASKED, reduction="sum")
    gradient_CV = logs_CV.exp_()
    if gradient_CV.is_cpu and not torch.compiler.is_compiling():
        # Saves three passes over all logits, for the same bits.
        gradient_CV[torch.arange(len(targets_C), device="cpu"), targets_C.clamp(min=0)] -= 1.0
    else:
        # A comparison instead of a scatter: it is deterministic on every device, and fused if this is compiled.
        at_target_CV = (torch.arange(logits_CV.shape[1], device=logits_CV.device) == targets_C[:, None]).float()
        gradient_CV = gradient_CV.sub_(at_target_CV)
    gradient_CV = gradient_CV.to(logits_CV.dtype)
    return loss, gradient_CV.mul_((targets_C != MASKED)[:, None])


class _HeadLoss(torch.autograd.Function):
    """Computes the gradients in the forward pass, while it has the logits of a chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        narrow: torch.dtype,
        shard: VocabularyShard | None,
    ) -> Tensor:
        narrow_VD = weight_VD.to(narrow)
        loss = torch.zeros((), device=x_ND.device)
        weight_gradient_VD = None
        gradients = []
        for x_CD, targets_C in _chunks(x_ND.to(narrow), weight_VD, targets_N, shard):
            part, gradient_CV = _loss_and_gradient(x_CD @ narrow_VD.t(), targets_C, shard)
            loss = loss + part
            gradients.append(gradient_CV @ narrow_VD)
            if not ctx.needs_input_grad[1]:  # the head is frozen
                continue
            one_VD = (gradient_CV.t() @ x_CD).float()
            weight_gradient_VD = one_VD if weight_gradient_VD is None else weight_gradient_VD.add_(one_VD)
        ctx.save_for_backward(torch.cat(gradients) if len(gradients) > 1 else gradients[0], weight_gradient_VD)
        ctx.formats = x_ND.dtype, weight_VD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        gradient_ND, gradient_VD = ctx.saved_tensors
        x_format, weight_format = ctx.formats
        of_weight = None if gradient_VD is None else (gradient_VD * above[0]).to(weight_format)
        return (gradient_ND * above[0]).to(x_format), of_weight, None, None, None
