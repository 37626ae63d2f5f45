"""Rows by one all-to-all each way, with as many rows for each rank as it gets.

Runs in: each train worker. Torch, never ray.

How many rows come is exchanged first, and read by the host, which on CUDA waits for the device once a layer.

Shape suffixes: R rows of this rank, Q rows for this rank's experts, D width, E experts, L experts of this rank, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from raydist.worker.comm import gloo_p2p


def build(group: dist.ProcessGroup) -> AllToAll:
    """See the contract in __init__.py."""
    return AllToAll(group)


class AllToAll:
    """See `raydist.worker.exchange.Exchange`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._ranks, self._rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.sent = 0

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # sizes are known to the host alone
    def __call__(self, rows_RD: Tensor, counts_E: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """See the contract in __init__.py."""
        theirs_E, out, into = self.sizes(rows_RD, counts_E)
        theirs_WL = theirs_E.view(self._ranks, -1)
        came_QD: Tensor = _Send.apply(rows_RD, out, into, self)  # type: ignore[no-untyped-call]
        # They came by rank, then expert; the experts take them by expert, then rank.
        experts_L = torch.arange(theirs_WL.shape[1], device=rows_RD.device)
        expert_Q = experts_L.repeat(self._ranks).repeat_interleave(theirs_E, output_size=sum(into))
        order_Q = expert_Q.argsort(stable=True)
        made_QD = experts(_Reorder.apply(came_QD, order_Q), theirs_WL.sum(0))  # type: ignore[no-untyped-call]
        back_Q = torch.empty_like(order_Q)
        back_Q[order_Q] = torch.arange(len(order_Q), device=order_Q.device)
        back_QD: Tensor = _Reorder.apply(made_QD, back_Q)  # type: ignore[no-untyped-call]
        back_RD: Tensor = _Send.apply(back_QD, into, out, self)  # type: ignore[no-untyped-call]
        return back_RD

    def sizes(self, rows_RD: Tensor, counts_E: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """(rows from each rank for each expert here, rows for each rank, rows from each rank)."""
        theirs_E = torch.empty_like(counts_E)
        dist.all_to_all_single(theirs_E, counts_E, group=self._group)
        sums = torch.stack([counts_E.view(self._ranks, -1).sum(1), theirs_E.view(self._ranks, -1).sum(1)])
        out, into = sums.tolist()
        return theirs_E, out, into

    def send(self, rows: Tensor, out: list[int], into: list[int]) -> Tensor:
        """`out[r]` rows to rank r; the result has `into[r]` rows from rank r."""
        came = rows.new_empty(sum(into), rows.shape[1])
        gloo_p2p.all_to_all_now(came, rows.contiguous(), self._group, into, out)
        self.sent += (sum(out) - out[self._rank]) * rows.shape[1] * rows.element_size()
        return came


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, out: list[int], into: list[int], exchange: AllToAll) -> Tensor:
        ctx.way = exchange, out, into
        return exchange.send(rows, out, into)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        exchange, out, into = ctx.way
        return exchange.send(above[0], into, out), None, None, None


class _Reorder(torch.autograd.Function):
    """rows[order], for an order that has every row once."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        grad = torch.empty_like(above[0])
        grad[order] = above[0]
        return grad, None
