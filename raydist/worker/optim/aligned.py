"""The same update of each number, wherever it stands in the tensor that a rank updates.

Runs in: each train worker. Torch, never ray.

On CPU torch's fused kernel updates whole vectors, and what is left at the end of a tensor one by one, rounded differently (multiply
and add in one operation or in two). How a strategy cuts a parameter decides which numbers those are. Here they are copied into
tensors of their own, padded with zeros to whole vectors, so that every number is updated as part of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from raydist.worker.optim.optimizers import run_closure

VECTOR = 16
"""fp32 values of the longest vector for which torch's CPU kernels are built (AVX-512)."""
Row = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Values, gradients and both moments, flat and of one length; and the count of steps."""


@contextmanager
def whole_vectors(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows with the same numbers, each of whole vectors. On exit what has changed in the copies is written back."""
    made: list[Row] = []
    copies: list[tuple[Tensor, Tensor]] = []
    for *tensors, steps in rows:
        body = tensors[0].numel() // VECTOR * VECTOR
        rest = tensors[0].numel() - body
        if body:
            made.append((*(t[:body] for t in tensors), steps))  # type: ignore[arg-type]
        if rest:
            padded = torch.zeros(len(tensors), VECTOR, dtype=tensors[0].dtype)
            for into, tensor in zip(padded, tensors, strict=True):
                into[:rest] = tensor[body:]
            made.append((*padded, steps))
            copies += [(tensors[i][body:], padded[i][:rest]) for i in (0, 2, 3)]
    yield made
    for original, changed in copies:
        original.copy_(changed)


class AlignedAdamW(AdamW):
    """torch's fused AdamW on CPU, for dense parameters."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """See `torch.optim.AdamW.step`."""
        loss = run_closure(closure)
        for group in self.param_groups:
            columns: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *columns)  # type: ignore[no-untyped-call]  # creates the state, as torch does
            values, grads, first, second, _, steps = columns
            if not values:
                continue
            torch._foreach_add_(steps, 1)
            flat = [[t.view(-1) for t in column] for column in (values, grads, first, second)]
            with whole_vectors(list(zip(*flat, steps, strict=True))) as rows:
                fused_adamw(group, rows)
        return loss


def fused_adamw(group: dict[str, Any], rows: Sequence[Row]) -> None:
    """torch's kernel on these rows, whose steps are counted already."""
    values, grads, exp_avgs, exp_avg_sqs, steps = (list(column) for column in zip(*rows, strict=True))
    torch._fused_adamw_(
        values,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        lr=float(group["lr"]),
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
    )


def aligned(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same optimizer, before its first step, if it is torch's fused AdamW; others as they are."""
    if type(optimizer) is not AdamW or not optimizer.defaults["fused"]:
        return optimizer
    given = {name: optimizer.defaults[name] for name in ("lr", "betas", "eps", "fused")}
    return AlignedAdamW(optimizer.param_groups, **given)
