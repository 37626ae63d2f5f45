"""PowerSGD (Vogels et al. 2019, arXiv 1905.13727): matrices are sent as two factors of a low rank, found by one power iteration.

Runs in: each train worker. Torch, never ray.

With M_i the gradient of rank i and Q from the step before:

    P = sum M_i Q       one all-reduce; P is made orthonormal, on each rank alike
    Q = sum M_i^T P     one all-reduce; the sum of the gradients is nearly P Q^T, and Q begins the next step

What rank i lost is M_i - P P^T M_i, so what was sent and what was lost add up on each rank, not only over all. Vectors, and
matrices whose factors would be no smaller, are summed whole. Each expert of a layer has factors of its own (docs/adr/0018).

Shape suffixes: P parts, E matrices, r rows of a part, c columns, k rank.
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
from raydist.extension_plans import CompressorPlan, sides
from raydist.spec.parts import Part
from raydist.worker.comm.compressors import Matrix, Sums

_TINY, _NOISE = 1e-30, 1e-5
"""The least divisor; and the share of a column below which what is left beside the others is taken for rounding."""


class Options(Part):
    """Options of powersgd."""

    rank: int = Field(4, ge=1, description="Columns of the factors: more are nearer to the gradient, and more bytes.")


def _pays(rank: int, rows: int, columns: int) -> bool:
    return rank <= min(rows, columns) and rank * (rows + columns) < rows * columns


def _bits(options: Mapping[str, Any], shapes: Sequence[Sequence[int]]) -> float:
    rank, sent, numbers = Options(**options).rank, 0, 0
    for shape in shapes:
        count, rows, columns = sides(shape) if len(shape) > 1 else (1, 1, math.prod(shape))
        numbers += count * rows * columns
        sent += count * (rank * (rows + columns) if _pays(rank, rows, columns) else rows * columns)
    return 32 * sent / numbers if numbers else 1.0


PLAN = CompressorPlan(feedback=True, bits=1.0, bits_of=_bits, loss_increase=0.13, checks_shapes=True)


class Compressor(Sums):
    """Factors of `rank` columns, which start from the ones of the step before."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._rank = Options(**options).rank

    def refuse(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """See `Sums.refuse`."""
        matrices = [sides(shape)[1:] for shape in shapes.values() if len(shape) > 1]
        if any(_pays(self._rank, *each) for each in matrices):
            return
        most = max((r * c // (r + c) - (r * c % (r + c) == 0) for r, c in matrices), default=0)
        raise UserError(
            f"comm.options.rank: {self._rank}: no matrix of the model is larger than its factors of that rank",
            f"set it to at most {most}" if most else "set comm.compress: int8, which takes gradients of any shape",
        )

    def state(self, name: str, count: int, rows: int, columns: int) -> Tensor | None:
        """Q, [c, k] or [E, c, k]: random, and of each name the same on every rank and in every run."""
        if not _pays(self._rank, rows, columns):
            return None
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.randn(*([count] if count > 1 else []), columns, self._rank, generator=generator)

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
        qs = [state[m.name] for m in low]
        products = [(m.values @ _of_each(m, q)).flatten(0, 1) for m, q in zip(low, qs, strict=True)]
        factors = [p[: len(q)] if q.dim() > 2 else p for p, q in zip(products, qs, strict=True)]  # [P r, k], [E, r, k]
        sums = _added([*factors, *(values for values, _ in whole)], add_up)
        for (values, result), total in zip(whole, sums[len(low) :], strict=True):
            result.copy_(total)
            values.zero_()  # nothing of it was lost
        ps = [_of_parts(m, _orthonormal(p)) for m, p in zip(low, sums, strict=False)]  # [P, r, k], [P, E/P, r, k]
        products = [m.values.mT @ p for m, p in zip(low, ps, strict=True)]
        own = [  # [c, k], [E, c, k]
            p.flatten(0, 1)[: len(q)] if q.dim() > 2 else p.sum(0) for p, q in zip(products, qs, strict=True)
        ]
        sums = _added(own, add_up)
        made = {}
        for m, p, mine, q in zip(low, ps, own, sums, strict=True):
            m.result.copy_(p @ _of_each(m, q).mT)
            m.values.sub_(p @ _of_each(m, mine).mT)
            made[m.name] = _next(q, state[m.name])
        return made


def _of_parts(m: Matrix, factor: Tensor) -> Tensor:
    """[P r, k] as [P, r, k]; of several matrices [E, r, k] as [P, E/P, r, k], with zeros for what only fills up the last part."""
    places = m.values.shape[:2]
    if missing := places.numel() - len(factor):
        factor = torch.cat([factor, factor.new_zeros(missing, *factor.shape[1:])])
    return factor.view(*places, *factor.shape[1:])


def _next(q: Tensor, before: Tensor) -> Tensor:
    """Q for the next step: only its directions matter. A column of zeros, as of an expert without tokens, would stay so for good:
    the one before is kept."""
    largest = q.abs().amax(-2, keepdim=True)
    return torch.where(largest == 0, before, q / largest.amax(-1, keepdim=True).clamp_min(_TINY))


def _of_each(m: Matrix, q: Tensor) -> Tensor:
    """Q for each part: all parts of one matrix have the same."""
    return q if q.dim() == 2 else _of_parts(m, q)


def _added(tensors: Sequence[Tensor], add_up: Callable[[Tensor], None]) -> list[Tensor]:
    """The sums of these over the ranks, in one all-reduce."""
    if not tensors:
        return []
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    add_up(flat)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _orthonormal(columns: Tensor) -> Tensor:
    """[r, k], or several of them, with orthonormal columns, in place, by Gram-Schmidt: few columns, and every rank the same
    operations. A column that the others make up becomes zeros, as of an expert with fewer tokens than columns: its rounding errors,
    scaled up, would be orthogonal to none."""
    at_first = columns.norm(dim=-2, keepdim=True)
    for i in range(columns.shape[-1]):
        column = columns[..., i : i + 1]
        norm = column.norm(dim=-2, keepdim=True)
        column.div_(torch.where(norm > _NOISE * at_first[..., i : i + 1], norm, torch.inf))
        if i + 1 < columns.shape[-1]:
            after = columns[..., i + 1 :]
            after.sub_(column @ (column.mT @ after))
    return columns
