"""Patterns of numbers that identify the sending rank, and a count of wrong elements in what is received.

Runs in: ranks. Torch, never ray. All are integers up to 251, so exact in bf16 and fp32, in any order of addition.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Pattern = Callable[[torch.Tensor], torch.Tensor]
"""Indices (int64) -> the expected numbers."""

_CHUNK = 2**20
_PRIME = 251


def term(rank: int, world: int) -> Pattern:
    """The term of `rank` in a sum. At each index two ranks have one: one up to 7, the other up to 112 in steps of 16."""

    def made(i: torch.Tensor) -> torch.Tensor:
        return torch.where(i % world == rank, 1 + i % 7, 0) + torch.where(
            (i + 1) % world == rank, 16 * (1 + i // world % 7), 0
        )

    return made


def total(world: int) -> Pattern:
    """The sum of all ranks' terms. A missing, repeated or wrong term changes it."""

    def made(i: torch.Tensor) -> torch.Tensor:
        return 1 + i % 7 + 16 * (1 + i // world % 7)

    return made


def message(source: torch.Tensor | int, target: torch.Tensor | int) -> Pattern:
    """The data that `source` sends to `target`: even positions depend on the source, odd ones on the target."""

    def made(i: torch.Tensor) -> torch.Tensor:
        return (37 * torch.where(i % 2 == 0, source, target) + i) % _PRIME

    return made


def block(length: int, of: Callable[[torch.Tensor], Pattern]) -> Pattern:
    """Blocks of `length`, one after another: the pattern of block number b is `of(b)`, at indices within the block."""

    def made(i: torch.Tensor) -> torch.Tensor:
        return of(i // length)(i % length)

    return made


def shifted(by: int, pattern: Pattern) -> Pattern:
    """The pattern, starting at index `by`."""
    return lambda i: pattern(i + by)


def fill(tensor: torch.Tensor, pattern: Pattern) -> None:
    """Writes the pattern into a flat tensor, in pieces: it allocates no second tensor of that size."""
    for start, piece in _pieces(tensor):
        piece.copy_(pattern(torch.arange(start, start + piece.numel(), device=tensor.device)))


def wrong(tensor: torch.Tensor, pattern: Pattern) -> int:
    """Number of elements of a flat tensor that differ from the pattern; NaN differs."""
    count = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start, piece in _pieces(tensor):
        expected = pattern(torch.arange(start, start + piece.numel(), device=tensor.device))
        count += (piece != expected.to(tensor.dtype)).sum()
    return int(count)


def _pieces(tensor: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    return [(start, tensor[start : start + _CHUNK]) for start in range(0, tensor.numel(), _CHUNK)]
