"""Numbers that tell which rank they came from, and of what is received how many are wrong.

Runs in: ranks. Torch, never ray. All are whole and at most 251, thus exact in bf16 as in fp32, in whatever order they are added.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Pattern = Callable[[torch.Tensor], torch.Tensor]
"""Indices (int64) -> the numbers that belong there."""

_CHUNK = 2**20
_PRIME = 251


def term(rank: int, world: int) -> Pattern:
    """What `rank` adds to a sum: at each index two ranks add something, one up to 7, the other up to 112 in steps of 16."""

    def made(i: torch.Tensor) -> torch.Tensor:
        return torch.where(i % world == rank, 1 + i % 7, 0) + torch.where(
            (i + 1) % world == rank, 16 * (1 + i // world % 7), 0
        )

    return made


def total(world: int) -> Pattern:
    """The sum of all ranks' terms. A term that is missing, is there twice, or is another rank's, makes another sum."""

    def made(i: torch.Tensor) -> torch.Tensor:
        return 1 + i % 7 + 16 * (1 + i // world % 7)

    return made


def message(source: torch.Tensor | int, target: torch.Tensor | int) -> Pattern:
    """What `source` sends to `target`: numbers at even places tell the one, at odd places the other."""

    def made(i: torch.Tensor) -> torch.Tensor:
        return (37 * torch.where(i % 2 == 0, source, target) + i) % _PRIME

    return made


def block(length: int, of: Callable[[torch.Tensor], Pattern]) -> Pattern:
    """Blocks of `length`, one after another: the pattern of block number b is `of(b)`, at indices within the block."""

    def made(i: torch.Tensor) -> torch.Tensor:
        return of(i // length)(i % length)

    return made


def shifted(by: int, pattern: Pattern) -> Pattern:
    """The pattern as it is from index `by` on."""
    return lambda i: pattern(i + by)


def fill(tensor: torch.Tensor, pattern: Pattern) -> None:
    """Writes it into a flat tensor, in pieces: no second tensor of that size is made."""
    for start, piece in _pieces(tensor):
        piece.copy_(pattern(torch.arange(start, start + piece.numel(), device=tensor.device)))


def wrong(tensor: torch.Tensor, pattern: Pattern) -> int:
    """How many elements of a flat tensor are not the pattern's; NaN is wrong."""
    count = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start, piece in _pieces(tensor):
        expected = pattern(torch.arange(start, start + piece.numel(), device=tensor.device))
        count += (piece != expected.to(tensor.dtype)).sum()
    return int(count)


def _pieces(tensor: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    return [(start, tensor[start : start + _CHUNK]) for start in range(0, tensor.numel(), _CHUNK)]
