"""Gradients that are sent together: their places in rows of numbers, and what each step left of them.

Runs in: each train worker. Torch, never ray.

    Flat     a bucket of DDP: parameters one after another, cut into W rows of equal length
    Packed   a unit of ZeRO or FSDP2: row w has the rows of every parameter that rank w gets, [W, S]

Rows are padded with zeros to a multiple of the compressor's `align`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.futures import Future

from raydist.extension_plans import sides
from raydist.worker.comm.compressors import Matrix, Rows, Sums


@dataclass(slots=True)
class Piece:
    """See above. `shapes`: of the parameters, or of this rank's parts of them, by name, in their order in the piece.

    `kept`, `made`: what is left of the gradients before this step, and after it; [W, S] each, None without error feedback. `made`
    becomes `kept` with the update. `kept_state`, `made_state`: the same of the compressor's own state.
    """

    shapes: Mapping[str, torch.Size]
    world: int
    packed: bool
    row: int
    """S before padding; of a flat piece the row without the last ones' padding."""
    size: int
    """S."""
    align: int = 1
    """Each parameter of a packed piece begins at a multiple of it."""
    used: bool = False
    """Whether this step has sent it already."""
    kept: Tensor | None = None
    made: Tensor | None = None
    kept_state: dict[str, Tensor] = field(default_factory=dict)
    made_state: dict[str, Tensor] = field(default_factory=dict)
    pending: Future[Tensor] | None = None
    """The sum that is on its way."""
    room: dict[str, Tensor] = field(default_factory=dict)
    """Buffers for what is sent and what arrives."""

    @property
    def numel(self) -> int:
        """Numbers of the whole piece as the strategy has it."""
        return self.world * self.row if self.packed else sum(shape.numel() for shape in self.shapes.values())

    def body(self, rows_WS: Tensor) -> Tensor:
        """The view without padding: [numel] of a flat piece, [W, row] of a packed one."""
        return rows_WS[:, : self.row] if self.packed else rows_WS.view(-1)[: self.numel]

    def clear_padding(self, rows_WS: Tensor) -> None:
        """Makes it zeros: after an overflow it is not finite, and ZeRO's buffers have there what they held before."""
        if not self.packed:
            rows_WS.view(-1)[self.numel :].zero_()
            return
        rows_WS[:, self.row :].zero_()
        for _, shape, at, length in self.places():
            rows_WS[:, at + length : _up(at + length, self.align)].zero_()
            for row in range(shape.numel() // max(length, 1), self.world):  # the last ranks may get fewer rows, or none
                rows_WS[row, at + max(shape.numel() - row * length, 0) : at + length].zero_()

    def like(self, gradients: Tensor) -> Tensor:
        """The strategy's gradients in the shape of `body`."""
        return gradients.view(self.world, self.row) if self.packed else gradients.view(-1)

    def buffer(self, name: str, shape: Sequence[int], device: torch.device) -> Tensor:
        """Bytes that the piece keeps, for what is on its way; zeros at first."""
        if name not in self.room:
            self.room[name] = torch.zeros(*shape, dtype=torch.uint8, device=device)
        return self.room[name]

    def places(self) -> Iterator[tuple[str, torch.Size, int, int]]:
        """(name, shape, first, length) of each parameter: in a row of a packed piece, in all of a flat one."""
        at = 0
        for name, shape in self.shapes.items():
            length = _share(shape, self.world) if self.packed else shape.numel()
            yield name, shape, at, length
            at = _up(at + length, self.align)

    def of_parameters(self, rows_WS: Tensor) -> dict[str, Tensor]:
        """Each parameter's numbers in its shape: views of a flat piece, copies of a packed one."""
        body = self.body(rows_WS)
        return {
            name: body[..., at : at + length].reshape(-1)[: shape.numel()].view(shape)
            for name, shape, at, length in self.places()
        }

    def take(self, rows_WS: Tensor, numbers: Mapping[str, Tensor]) -> None:
        """The inverse of `of_parameters`."""
        body = self.body(rows_WS)
        for name, _, at, length in self.places():
            if not self.packed:
                body[at : at + length].copy_(numbers[name].reshape(-1))
                continue
            for row, part in zip(body, torch.split(numbers[name].reshape(-1), max(length, 1)), strict=False):
                row[at : at + len(part)].copy_(part)

    def split(self, values_WS: Tensor, result_WS: Tensor) -> tuple[list[Matrix], list[tuple[Tensor, Tensor]]]:
        """For `Sums.reduce`: (matrices, the other gradients)."""
        values, result = self.body(values_WS), self.body(result_WS)
        matrices, rest = [], []
        for name, shape, at, length in self.places():
            mine, its = values[..., at : at + length], result[..., at : at + length]
            if len(shape) > 1 and length:
                count, rows, columns = sides(shape)
                form = (self.world if self.packed else 1, -1, *([rows] if count > 1 else []), columns)
                matrices.append(Matrix(name, mine.view(form), its.view(form)))
            elif length:
                rest.append((mine, its))
        return matrices, rest


def flat(shapes: Mapping[str, torch.Size], world: int, compressor: Rows | Sums) -> Piece:
    """A piece of whole parameters, one after another."""
    row = -(-sum(shape.numel() for shape in shapes.values()) // world)
    return Piece(dict(shapes), world, packed=False, row=row, size=_padded(row, compressor))


def packed(
    shapes: Mapping[str, torch.Size], world: int, compressor: Rows | Sums | None = None, apart: bool = False
) -> Piece:
    """A piece of parameters that are cut by rows like torch.chunk, padded, the parts for one rank together.

    `apart`: no block of the compressor has numbers of two parameters, so that what becomes of one does not depend on the others.
    """
    align = compressor.align if apart and isinstance(compressor, Rows) else 1
    row = sum(_up(_share(shape, world), align) for shape in shapes.values())
    return Piece(dict(shapes), world, packed=True, row=row, size=_padded(row, compressor), align=align)


def _share(shape: torch.Size, world: int) -> int:
    return -(-shape[0] // world) * math.prod(shape[1:])


def _padded(row: int, compressor: Rows | Sums | None) -> int:
    return _up(row, compressor.align if isinstance(compressor, Rows) else 1)


def _up(number: int, align: int) -> int:
    return -(-number // align) * align
