"""The mixture-of-experts layer that the decoders share: a router, experts, and shared experts that all tokens take.

Runs in: each train worker, and in exports of weights. May not import ray.

    tokens -> router: experts and weights of each token
           -> rows, one for each (token, chosen expert), sorted by expert -> experts -> weighted sum of each token's rows

No expert has a capacity, so no token is dropped. With `parallel.expert` the experts are on several ranks, and rows are sent to the
rank of their expert and back by an exchange (raydist/worker/exchange); without, all rows stay.

Shape suffixes: B sequences, T tokens of a sequence on this rank, D width, N = B T tokens, E experts, L experts of this rank, K
experts of a token, R = N K rows, F width of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from raydist.spec.experts import Experts as Shape
from raydist.worker.exchange import Exchange
from raydist.worker.model._layers import SwiGLU


class Router(nn.Linear):
    """Chooses the experts of each token. In fp32, also under autocast: bf16 would change the choice of one token in a hundred.

    `bias` is not added to the logits, but to the scores when experts are chosen; it has no gradient (`MixtureOfExperts.move_bias`).
    """

    def __init__(self, width: int, shape: Shape) -> None:
        super().__init__(width, shape.count, bias=False)
        self.shape = shape
        del self.bias
        self.register_buffer("bias", torch.zeros(shape.count, device="cpu") if shape.bias else None)

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """x_ND -> (weights_NK, experts_NK, scores_NE). The K experts of a token are in no order."""
        shape = self.shape
        with torch.autocast(x_ND.device.type, enabled=False):
            logits_NE = F.linear(x_ND.float(), self.weight.float())
            scores_NE = logits_NE.softmax(-1) if shape.score == "softmax" else logits_NE.sigmoid()
            choice_NE = scores_NE if self.bias is None else scores_NE + self.bias
            if shape.top_groups < shape.groups:
                choice_NE = _of_best_groups(choice_NE, shape)
            # Indices alone: no gradient goes through the choice.
            experts_NK = choice_NE.detach().topk(shape.chosen, dim=-1, sorted=False).indices
            weights_NK = scores_NE.gather(1, experts_NK)
            if shape.normalise:
                weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
            return weights_NK * shape.scale, experts_NK, scores_NE


def _of_best_groups(choice_NE: Tensor, shape: Shape) -> Tensor:
    """The scores, -inf outside of the best groups of each token."""
    grouped = choice_NE.view(len(choice_NE), shape.groups, -1)
    most = 1 if shape.group_score == "best" else 2
    best = grouped.topk(most, dim=-1).values.sum(-1).topk(shape.top_groups, dim=-1, sorted=False).indices
    kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
    return grouped.masked_fill(~kept[..., None], -math.inf).flatten(1)


class Experts(nn.Module):
    """SwiGLU layers, stacked: `gate` and `up` [E, F, D], `down` [E, D, F]. A rank may have some of them."""

    def __init__(self, width: int, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(shape.count, shape.hidden, width))
        self.up = nn.Parameter(torch.empty(shape.count, shape.hidden, width))
        self.down = nn.Parameter(torch.empty(shape.count, width, shape.hidden))

    def forward(self, rows_RD: Tensor, counts_L: Tensor) -> Tensor:
        """Rows sorted by expert, and how many each expert has -> their outputs. An expert without rows gets a gradient of zeros."""
        device = rows_RD.device.type
        if torch.is_autocast_enabled(device):
            rows_RD = rows_RD.to(torch.get_autocast_dtype(device))
        # Of grouped products torch.compile knows those in bf16 alone (torch 2.13).
        outputs = self._outputs if rows_RD.dtype is torch.bfloat16 else self._outputs_eager
        made: Tensor = outputs(rows_RD, counts_L)
        return made

    def _outputs(self, rows_RD: Tensor, counts_L: Tensor) -> Tensor:
        hidden_RF = F.silu(_grouped(rows_RD, self.gate, counts_L)) * _grouped(rows_RD, self.up, counts_L)
        return _grouped(hidden_RF, self.down, counts_L)

    _outputs_eager = torch.compiler.disable(_outputs)  # type: ignore[no-untyped-call]


def _grouped(rows_RI: Tensor, weights_LOI: Tensor, counts_L: Tensor) -> Tensor:
    """The rows of each expert times its weights, in the rows' format: [R, O]."""
    weights_LOI = weights_LOI.to(rows_RI.dtype)
    # grouped_mm takes rows whose bytes are a multiple of 16 alone.
    if all(size * rows_RI.element_size() % 16 == 0 for size in weights_LOI.shape[1:]):
        return F.grouped_mm(rows_RI, weights_LOI.transpose(1, 2), offs=counts_L.cumsum(0, dtype=torch.int32))
    parts = torch.split(rows_RI, counts_L.tolist())
    return torch.cat([F.linear(part, weights) for part, weights in zip(parts, weights_LOI, strict=True)])


class MixtureOfExperts(nn.Module):
    """The feed-forward layer of a block. Set before training, by raydist/worker/parallel/_expert.py and worker/expert_loads.py:

    exchange        sends rows to the ranks of their experts; None: all experts are here
    sequence_groups along each the ranks share each sequence (tensor and context parallel); (): this rank has whole ones
    gradient_factor what the gradient of the experts' weights is multiplied by
    loss_factor     what the loss of a micro-batch is multiplied by before its backward pass
    real            whether the micro-batch has samples: a rank without any computes a masked row, which belongs to no load
    lengths         int64 [B]: tokens of each whole sequence; the rest is padding, and belongs to no load. None: there is none
    records         whether this pass counts `loads`: a repeated one does not
    loads           int64 [E]: rows of each expert, of this rank's tokens, since someone set it to zero
    """

    def __init__(self, width: int, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.router = Router(width, shape)
        self.experts = Experts(width, shape)
        self.shared = SwiGLU(width, shape.shared) if shape.shared else None
        self.shared_gate = nn.Linear(width, 1, bias=False) if shape.shared_gate else None
        self.exchange: Exchange | None = None
        self.sequence_groups: tuple[dist.ProcessGroup, ...] = ()
        self.gradient_factor = 1.0
        self.loss_factor = 1.0
        self.real, self.records = True, False
        self.lengths: Tensor | None = None
        # Not a buffer: DDP would send rank 0's to the others.
        self.loads = torch.zeros(shape.count, dtype=torch.int64, device="cpu")

    def forward(self, x_BTD: Tensor) -> Tensor:
        """x_BTD -> BTD."""
        x_ND, counted_BT = x_BTD.flatten(0, 1), self._not_padding(x_BTD)
        weights_NK, experts_NK, scores_NE = self.router(x_ND)
        y_ND = self._routed(x_ND, weights_NK, experts_NK, counted_BT)
        if self.shared is not None:
            shared_ND = self.shared(x_ND)
            if self.shared_gate is not None:
                shared_ND = self.shared_gate(x_ND).sigmoid() * shared_ND
            y_ND = y_ND + shared_ND
        if self.shape.balance and self.training and self.real:
            balance = self.shape.balance * self._imbalance(scores_NE.view(*x_BTD.shape[:2], -1), counted_BT)
            y_ND = _add_loss(y_ND, balance, self.loss_factor)
        return y_ND.view_as(x_BTD)

    def _not_padding(self, x_BTD: Tensor) -> Tensor | None:
        """Which of this rank's tokens are none of padding, bool BT; None if all are."""
        if self.lengths is None:
            return None
        place, time = 0, x_BTD.shape[1]
        for group in reversed(self.sequence_groups):
            place = place * dist.get_world_size(group) + dist.get_rank(group)
        return torch.arange(place * time, (place + 1) * time, device=x_BTD.device) < self.lengths[:, None]

    def _routed(self, x_ND: Tensor, weights_NK: Tensor, experts_NK: Tensor, counted_BT: Tensor | None) -> Tensor:
        count, chosen = self.shape.count, self.shape.chosen
        experts_R = experts_NK.flatten()
        order_R = experts_R.argsort(stable=True)
        counts_E = torch.zeros(count, dtype=torch.int64, device=x_ND.device)
        counts_E.scatter_add_(0, experts_R, torch.ones_like(experts_R))
        self._record(counts_E, experts_NK, counted_BT)
        device = x_ND.device.type
        if torch.is_autocast_enabled(device):  # in the format in which the experts take them: half the bytes are sent
            x_ND = x_ND.to(torch.get_autocast_dtype(device))
        rows_RD: Tensor = _Spread.apply(x_ND, order_R, chosen, 1 / self.gradient_factor)  # type: ignore[no-untyped-call]
        exchange, experts = self.exchange, self.experts
        rows_RD = experts(rows_RD, counts_E) if exchange is None else exchange(rows_RD, counts_E, experts)
        made: Tensor = _Gather.apply(rows_RD, weights_NK, order_R, self.gradient_factor)  # type: ignore[no-untyped-call]
        return made

    @torch.no_grad()
    def _record(self, counts_E: Tensor, experts_NK: Tensor, counted_BT: Tensor | None) -> None:
        if not (self.records and self.real and self.training):
            return
        if counted_BT is None:
            self.loads += counts_E
        else:
            counted_NK = counted_BT.reshape(-1, 1).expand_as(experts_NK)
            self.loads.scatter_add_(0, experts_NK.flatten(), counted_NK.flatten().to(torch.int64))

    def _imbalance(self, scores_BTE: Tensor, counted_BT: Tensor | None) -> Tensor:
        """The balance loss of each sequence, times its tokens, summed over this rank's tokens, without the factor.

        f_i is the share of tokens that have expert i among their best, times E / K; P_i the mean of i's share of a token's scores.
        """
        chosen = scores_BTE.detach().topk(self.shape.chosen, dim=-1).indices
        best_BTE = torch.zeros_like(scores_BTE).scatter_(-1, chosen, 1.0)
        shares_BTE = scores_BTE / scores_BTE.sum(-1, keepdim=True)
        tokens: int | Tensor = scores_BTE.shape[1]
        if counted_BT is not None:
            best_BTE, shares_BTE = best_BTE * counted_BT[..., None], shares_BTE * counted_BT[..., None]
        best_BE = best_BTE.sum(1)
        for group in self.sequence_groups:
            dist.all_reduce(best_BE, group=group)
            tokens *= dist.get_world_size(group)
        if self.lengths is not None:
            tokens = self.lengths.clamp(min=1)[:, None]  # a row without tokens has neither best ones nor shares
        f_BE = best_BE * (self.shape.count / (self.shape.chosen * tokens))
        return (shares_BTE.sum(1) * f_BE).sum()

    @torch.no_grad()
    def move_bias(self, loads_E: Tensor) -> None:
        """After an update: moves the bias by its rate towards experts with less than the mean of `loads_E`, all ranks' loads."""
        bias = self.router.bias
        if bias is not None and self.shape.bias_rate:
            loads = loads_E.double()
            bias.add_(torch.sign(loads.mean() - loads).to(bias), alpha=self.shape.bias_rate)


class _Spread(torch.autograd.Function):
    """x_ND -> rows_RD in the order `order_R` of (token, choice). Backward sums the K rows of a token in one order."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_R: Tensor, chosen: int, factor: float) -> Tensor:
        ctx.save_for_backward(order_R)
        ctx.chosen, ctx.factor = chosen, factor
        return x_ND[order_R // chosen]

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        (order_R,) = ctx.saved_tensors
        grad_RD = torch.empty_like(above[0])
        grad_RD[order_R] = above[0]
        grad_ND = grad_RD.view(-1, ctx.chosen, grad_RD.shape[1]).sum(1)
        return grad_ND if ctx.factor == 1.0 else grad_ND * ctx.factor, None, None, None


class _Gather(torch.autograd.Function):
    """rows_RD in the order `order_R` -> the weighted sum of each token's rows, ND in fp32."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weights_NK: Tensor, order_R: Tensor, factor: float) -> Tensor:
        back_R = torch.empty_like(order_R)
        back_R[order_R] = torch.arange(len(order_R), device=order_R.device)
        by_token_NKD = rows_RD[back_R].view(*weights_NK.shape, rows_RD.shape[1])
        ctx.save_for_backward(by_token_NKD, weights_NK, order_R)
        ctx.factor = factor
        return (by_token_NKD.float() * weights_NK[..., None]).sum(1)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        by_token_NKD, weights_NK, order_R = ctx.saved_tensors
        grad_ND = above[0]
        grad_NK = (by_token_NKD.float() * grad_ND[:, None]).sum(-1)
        scaled_NK = weights_NK if ctx.factor == 1.0 else weights_NK * ctx.factor
        grad_RD = (grad_ND[:, None] * scaled_NK[..., None]).flatten(0, 1)[order_R]
        return grad_RD.to(by_token_NKD.dtype), grad_NK, None, None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # in a graph `loss` would get no gradient (torch 2.13)
def _add_loss(x: Tensor, loss: Tensor, factor: float) -> Tensor:
    made: Tensor = _AddLoss.apply(x, loss, factor)  # type: ignore[no-untyped-call]
    return made


class _AddLoss(torch.autograd.Function):
    """x as it is; in backward `loss` gets the gradient `factor`, as if it were added to the loss of the micro-batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        ctx.like = loss
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        return above[0], torch.full_like(ctx.like, ctx.factor), None


def layers_of(*parts: nn.Module) -> Iterator[tuple[str, MixtureOfExperts]]:
    """(name, layer) of all layers with experts of a model, or of its parts on this rank."""
    for part in parts:
        yield from ((name, m) for name, m in part.named_modules() if isinstance(m, MixtureOfExperts))
