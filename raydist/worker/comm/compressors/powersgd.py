"""PowerSGD (Vogels et al. 2019, arXiv 1905.13727): matrices are sent as two factors of a low rank, found by one power iteration.

Runs in: each train worker. Torch, never ray.

With M_i the gradient of rank i and Q from the step before:

    P = sum M_i Q       one all-reduce; P is made orthonormal, on each rank alike
    Q = sum M_i^T P     one all-reduce; the sum of the gradients is nearly P Q^T, and Q begins the next step

What rank i lost is M_i - P P^T M_i, so what was sent and what was lost add up on each rank, not only over all. Vectors, and
matrices whose factors would be no smaller, are summed whole.

Shape suffixes: P parts, r rows of a part, c columns, k rank.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from raydist.errors import UserError
from raydist.extension_plans import CompressorPlan
from raydist.spec.parts import Part
from raydist.worker.comm.compressors import Matrix, Sums

PLAN = CompressorPlan(feedback=True, bits=1.0, loss_increase=0.13, checks_shapes=True)
_TINY = 1e-30


class Options(Part):
    """Options of powersgd."""

    rank: int = Field(4, ge=1, description="Columns of the factors: more are nearer to the gradient, and more bytes.")


class Compressor(Sums):
    """Factors of `rank` columns, which start from the ones of the step before."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._rank = Options(**options).rank

    def _pays(self, rows: int, columns: int) -> bool:
        return self._rank <= min(rows, columns) and self._rank * (rows + columns) < rows * columns

    def refuse(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """See `Sums.refuse`."""
        sides = {name: _sides(shape) for name, shape in shapes.items() if len(shape) > 1}
        if any(self._pays(*side) for side in sides.values()):
            return
        most = max((r * c // (r + c) - (r * c % (r + c) == 0) for r, c in sides.values()), default=0)
        raise UserError(
            f"comm.options.rank: {self._rank}: no matrix of the model is larger than its factors of that rank",
            f"set it to at most {most}" if most else "set comm.compress: int8, which takes gradients of any shape",
        )

    def state(self, name: str, rows: int, columns: int) -> Tensor | None:
        """Q, [c, k]: random, and of each name the same on every rank and in every run."""
        if not self._pays(rows, columns):
            return None
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.randn(columns, self._rank, generator=generator)

    def reduce(
        self,
        matrices: Sequence[Matrix],
        rest: Sequence[tuple[Tensor, Tensor]],
        state: Mapping[str, Tensor],
        add_up: Callable[[Tensor], None],
    ) -> dict[str, Tensor]:
        """See `Sums.reduce`."""
        low = [m for m in matrices if m.name in state]
        whole = [*((m.values, m.result) for m in matrices if m.name not in state), *rest]
        factors = [m.values @ state[m.name] for m in low]  # [P, r, k]
        sums = _added([*factors, *(values for values, _ in whole)], add_up)
        for (values, result), total in zip(whole, sums[len(low) :], strict=True):
            result.copy_(total)
            values.zero_()  # nothing of it was lost
        ps = [_orthonormal(p.reshape(-1, self._rank)).view(p.shape) for p in sums[: len(low)]]
        own = [(m.values.mT @ p).sum(0) for m, p in zip(low, ps, strict=True)]  # [c, k]
        sums = _added(own, add_up)
        made = {}
        for m, p, mine, q in zip(low, ps, own, sums, strict=True):
            m.result.copy_(p @ q.T)
            m.values.sub_(p @ mine.T)
            made[m.name] = q / q.abs().amax().clamp_min(_TINY)  # only its directions matter
        return made


def _sides(shape: Sequence[int]) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:])


def _added(tensors: Sequence[Tensor], add_up: Callable[[Tensor], None]) -> list[Tensor]:
    """The sums of these over the ranks, in one all-reduce."""
    if not tensors:
        return []
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    add_up(flat)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _orthonormal(columns: Tensor) -> Tensor:
    """[r, k] with orthonormal columns, in place, by Gram-Schmidt: few columns, and every rank the same operations."""
    for i in range(columns.shape[1]):
        column = columns[:, i : i + 1]
        column.div_(column.norm().clamp_min(_TINY))
        if i + 1 < columns.shape[1]:
            after = columns[:, i + 1 :]
            after.sub_(column @ (column.T @ after))
    return columns
