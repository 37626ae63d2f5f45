"""The L2 norm of the whole gradient, from the parts that the ranks hold.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from raydist.worker.comm.json_gather import gather_json
from raydist.worker.comm.tree import halved
from raydist.worker.distributed import Rank
from raydist.worker.parameter_table import ParameterTable


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


_SQUARES = 1 << 24
"""Numbers whose squares are held at a time."""


def row_norms(values_RN: Tensor) -> Tensor:
    """The norm of each row, whose bits depend on that row alone.

    torch's reduction does that on CPU. On CUDA it divides a row among more threads the fewer rows there are; there each addition
    is element by element.
    """
    if values_RN.device.type == "cpu":
        return torch.linalg.vector_norm(values_RN, dim=1)
    rows = max(_SQUARES // max(values_RN.shape[1], 1), 1)
    return torch.cat([halved(some.float().square()).sqrt() for some in torch.split(values_RN, rows)])


class RowNorm:
    """The same with the same bits for any split into rows: norms of rows, which no rank has a part of, are added in one order.

    Call it when every shard has its gradient. Sends a number for each row, unless each rank holds the whole gradient. Making one is
    a collective where ranks have different parameters.
    """

    def __init__(self, parameters: ParameterTable, rank: Rank) -> None:
        self._device = rank.device
        self._sends = not all(parameters.held_by_all(name) for name in parameters.trained)
        self._own: list[tuple[Tensor, slice]] = []
        columns_of = {name: shard.columns[1] for name, shard in parameters.shards.items()}
        if not parameters.is_same_everywhere:
            for of_rank in gather_json(columns_of, rank.control):
                columns_of |= of_rank
        first = 0
        # Not in the table's order, which on a rank with several stages of a pipeline is not the model's.
        for name in sorted(parameters.trained):
            whole = shape[0] if (shape := parameters[name].shape) else 1
            shard = parameters.shards.get(name)
            if shard is not None and shard.local.numel() and (not self._sends or parameters.counts(name)):
                rows = shard.local.shape[0] if shard.local.ndim else 1
                at = first + shard.columns[0] * whole + shard.first_row
                self._own.append((shard.local, slice(at, at + rows)))
            first += columns_of[name] * whole
        self.numbers = first
        """That are summed over the ranks."""

    def __call__(self) -> Tensor:
        squares = torch.zeros(self.numbers, dtype=torch.float64, device=self._device)
        for local, rows in self._own:
            if local.grad is not None:
                norms = row_norms(local.grad.reshape(rows.stop - rows.start, -1))
                squares[rows] = norms.to(self._device).double().square()
        if self._sends:
            dist.all_reduce(squares)  # each row is one rank's, to which zeros are added: exact in any order
        return halved(squares).sqrt()


class GradNorm:
    """Call it when every shard has its gradient: `grad_norm` of the ranks of `group`, or nothing is sent if each holds the whole
    gradient. `group`: all ranks, or those of a replica that trains apart; None: it is one rank."""

    numbers = 1
    """That are summed over the ranks."""

    def __init__(self, parameters: ParameterTable, rank: Rank, group: dist.ProcessGroup | None) -> None:
        self._device, self._group = rank.device, group
        names = [name for name in parameters.trained if name in parameters.shards]
        self._sends = group is not None and not all(parameters.held_by_all(name) for name in parameters.trained)
        self._shards = [
            (parameters.shards[name].local, len(parameters.group(name)) if self._sends else 1) for name in names
        ]

    def __call__(self) -> Tensor:
        grads = ((local.grad if local.numel() else None, copies) for local, copies in self._shards)
        return grad_norm(grads, self._group if self._sends else None, self._device)
