"""The L2 norm of the whole gradient, from the parts that the ranks hold.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from raydist.worker.distributed import Rank
from raydist.worker.parameter_table import ParameterTable


class GradNorm:
    """Call it when every shard has its gradient: a scalar in fp64 on the rank's device, the same on every rank.

    Squares are divided by the number of ranks that hold the same part and summed in fp64, in one all-reduce. If every rank holds
    the whole gradient, nothing is sent.
    """

    def __init__(self, parameters: ParameterTable, rank: Rank) -> None:
        self._device = rank.device
        names = [name for name in parameters.trained if name in parameters.shards]
        self._sends = not all(parameters.held_by_all(name) for name in parameters.trained)
        self._shards = [
            (parameters.shards[name].local, len(parameters.group(name)) if self._sends else 1) for name in names
        ]

    def __call__(self) -> Tensor:
        by_copies: dict[int, list[Tensor]] = {}
        for local, copies in self._shards:
            if local.grad is not None and local.numel():
                by_copies.setdefault(copies, []).append(local.grad)
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        for copies, held in by_copies.items():
            square += (get_total_norm(held).double() ** 2).to(self._device) / copies
        if self._sends:
            dist.all_reduce(square)
        return square.sqrt()
