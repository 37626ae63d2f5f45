"""Context parallel: the ranks of a group hold parts of each sequence, and exchange heads for tokens around attention (Ulysses).

Runs in: each train worker. Torch, never ray. Source: DeepSpeed-Ulysses, arXiv 2309.14509, section 3.1.

    own tokens, all heads --all-to-all--> all tokens, own heads   attention   --all-to-all--> own tokens, all heads

Outside of attention each token is computed alone, so a rank needs only its own. Weights are whole on every rank, and a rank's loss
and gradients are parts of the sums, which the strategy adds up: to it, ranks along `context` are replicas (`Mesh.of_state`). Each
rank gets its part of tokens and targets from worker/dataloader.py. Within a sequence, context ranks have consecutive parts, and the
tensor parallel ranks of one of them consecutive parts of it.

torch.compile ends a graph at an exchange: it cannot trace messages from rank to rank.

Shape suffixes: B sequences, S tokens of this rank, T = S C tokens, C ranks, H heads, L = H / C heads of this
rank, K size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from raydist.errors import UserError
from raydist.worker.comm import gloo_p2p
from raydist.worker.mesh import Mesh
from raydist.worker.model._layers import SelfAttention


class SharedSequence:
    """The ranks that share each sequence, for the attention of a model. `rank`: of this one; `size`: their number."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def own(self, tokens: int) -> slice:
        """The places in the sequence of this rank's tokens, of which it has so many."""
        return slice(self.rank * tokens, (self.rank + 1) * tokens)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def to_heads(self, q_BSHK: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of this rank's tokens -> of all tokens, BTLK each, of this rank's heads. One all-to-all.

        Key and value heads that `size` does not divide are sent to each rank whose queries use them.
        """
        sent = [q_BSHK]
        for x_BSGK in others:
            times = self.size // math.gcd(x_BSGK.shape[2], self.size)
            sent.append(x_BSGK.repeat_interleave(times, dim=2) if times > 1 else x_BSGK)
        made: tuple[Tensor, ...] = _ToHeads.apply(self, *sent)  # type: ignore[no-untyped-call]
        return made

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def to_tokens(self, y_BTLK: Tensor) -> Tensor:
        """The outputs of this rank's heads -> of all heads, BSHK, at this rank's tokens. One all-to-all."""
        (made,) = _ToTokens.apply(self, y_BTLK)  # type: ignore[no-untyped-call]
        out: Tensor = made
        return out

    def heads_of(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """See `to_heads`, without gradients."""
        parts = [x.reshape(*x.shape[:2], self.size, -1, x.shape[3]).permute(2, 0, 1, 3, 4) for x in tensors]  # CBSLK
        return tuple(x_CBSLK.transpose(0, 1).flatten(1, 2) for x_CBSLK in self._exchanged(parts))

    def tokens_of(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """See `to_tokens`, without gradients."""
        parts = [x.reshape(len(x), self.size, -1, *x.shape[2:]).transpose(0, 1) for x in tensors]  # CBSLK
        return tuple(x_CBSLK.permute(1, 2, 0, 3, 4).flatten(2, 3) for x_CBSLK in self._exchanged(parts))

    def _exchanged(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Element r of each goes to rank r; in the result it comes from rank r. One message to each rank."""
        rows = [part.reshape(self.size, -1) for part in parts]
        sent = torch.cat(rows, dim=1) if len(rows) > 1 else rows[0].contiguous()
        came = torch.empty_like(sent)
        gloo_p2p.all_to_all_now(came, sent, self.group)
        split = torch.split(came, [row.shape[1] for row in rows], dim=1)
        return [row.reshape(part.shape) for row, part in zip(split, parts, strict=True)]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shared: SharedSequence, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.shared = shared
        return shared.heads_of(tensors)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.shared.tokens_of(above)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shared: SharedSequence, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.shared = shared
        return shared.tokens_of(tensors)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.shared.heads_of(above)


def share_sequences(model: nn.Module, mesh: Mesh) -> None:
    """Lets a model compute this rank's part of each sequence. Before a pipeline cuts it, and before `strategy.wrap`. Sends nothing.

    Raises UserError for a model whose attention is another than the built-in models'.
    """
    layers = [module for module in model.modules() if isinstance(module, SelfAttention)]
    if not layers or not hasattr(model, "shared"):
        raise UserError(
            f"parallel.context: {mesh.context}: {type(model).__name__} cannot share sequences",
            "build it from Decoder and SelfAttention (docs/reference/models.md), or set parallel.context: 1",
        )
    group = mesh.group("context")
    assert group is not None, "a group of several ranks"
    shared = SharedSequence(group)
    for module in (model, *layers):
        module.shared = shared  # type: ignore[assignment]


def whole_masks(model: nn.Module, mesh: Mesh) -> None:
    """Lets each dropout draw the mask of the whole sequence, and take this rank's part: context and tensor parallel ranks, too,
    have the masks of one process."""
    rank, size = mesh.context_rank * mesh.tensor + mesh.tensor_rank, mesh.context * mesh.tensor
    for module in model.modules() if size > 1 else ():
        if isinstance(module, nn.Dropout) and module.p:
            module.forward = partial(_dropout, module, rank, size)  # type: ignore[method-assign]


def _dropout(module: nn.Dropout, rank: int, size: int, x_BSD: Tensor) -> Tensor:
    if not module.training:
        return x_BSD
    batch, tokens, *rest = x_BSD.shape
    ones_BTD = torch.ones(batch, tokens * size, *rest, dtype=x_BSD.dtype, device=x_BSD.device)
    return x_BSD * F.dropout(ones_BTD, module.p)[:, rank * tokens : (rank + 1) * tokens]
