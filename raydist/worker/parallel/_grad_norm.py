"""The L2 norm of the whole gradient, from the parts that the ranks hold.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm


def grad_norm(
    grads: Iterable[tuple[Tensor | None, int]], group: dist.ProcessGroup | None, device: torch.device
) -> Tensor:
    """A scalar in fp64 on `device`, the same on every rank of `group`. With `group` None nothing is sent.

    `grads`: for each parameter this rank's part of the gradient (or None), and the number of ranks of `group` that hold that part.
    Squares are divided by that number and summed in fp64, in one all-reduce.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for grad, copies in grads:
        if grad is not None:
            by_copies.setdefault(copies, []).append(grad)
    square = torch.zeros((), dtype=torch.float64, device=device)
    for copies, held in by_copies.items():
        square += (get_total_norm(held).double() ** 2).to(device) / copies
    if group is not None:
        dist.all_reduce(square, group=group)
    return square.sqrt()
