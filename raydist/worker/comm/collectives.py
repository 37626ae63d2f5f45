"""torch's collectives of one tensor per rank, by the names of torch 2.13, which warns of the old ones; and a sum of many tensors.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _named(new: str, old: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(dist, new, None) or getattr(dist, old)
    return found


all_gather = _named("all_gather_single", "all_gather_into_tensor")
"""All ranks' `input`, one after another, into `output`: (output, input, group=None, async_op=False)."""
reduce_scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")
"""The sum over the ranks of this rank's part of `input` into `output`: (output, input, op=SUM, group=None, async_op=False)."""


@torch.no_grad()
def sum_flat(tensors: Iterable[Tensor | None], group: dist.ProcessGroup, device: torch.device) -> None:
    """Replaces each tensor by its sum over the ranks of `group`, in one all-reduce on `device`. All ranks have the same shapes."""
    held = [tensor for tensor in tensors if tensor is not None and tensor.numel()]
    if not held:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in held]).to(device)
    dist.all_reduce(flat, group=group)
    for tensor, total in zip(held, torch.split(flat, [tensor.numel() for tensor in held]), strict=True):
        tensor.copy_(total.view_as(tensor))
