"""The layout of the optimizer's state: which values of which parameter are in which chunk.

Runs in: each train worker. Plain Python.

The ends of chunks must not change the result. The fused kernel processes whole vectors from its start, and the remainder in a loop
that rounds differently. So each parameter starts at a multiple of ALIGN values, and is cut at such multiples only: its vectors and
its remainder are the same as without chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PAGE = 4096
"""O_DIRECT needs memory, file position and length in multiples of the disk's block, which is at most this."""
FLOATS = PAGE // 4
"""fp32 values per page: chunks are cut at multiples of it."""
ALIGN = 64
"""Values. A multiple of every CPU's vector: 8 with AVX2, 16 with AVX-512, at most 64 with SVE."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Values `first` to `last` of parameter number `parameter`, which start at `at` in their chunk."""

    parameter: int
    first: int
    last: int
    at: int

    @property
    def there(self) -> slice:
        """The slice of the parameter's values."""
        return slice(self.first, self.last)

    @property
    def here(self) -> slice:
        """The slice of the chunk's values."""
        return slice(self.at, self.at + self.last - self.first)


@dataclass(frozen=True, slots=True)
class Layout:
    """All values in a row, `total` with padding. Parameter i starts at `starts[i]`; chunk k has values k*size..(k+1)*size."""

    size: int
    total: int
    starts: dict[int, int]
    chunks: tuple[tuple[Piece, ...], ...]

    @classmethod
    def of(cls, counts: Mapping[int, int], size: int) -> Layout:
        """The layout of parameters with `counts` values, in this order; chunks have at most `size` values, in whole pages."""
        starts: dict[int, int] = {}
        end = 0
        for number, count in counts.items():
            starts[number] = _up(end, ALIGN)
            end = starts[number] + count
        total = _up(end, FLOATS)
        size = max(min(size // FLOATS * FLOATS, total), FLOATS)
        chunks: list[list[Piece]] = [[] for _ in range(0, total, size)]
        for number, start in starts.items():
            first = 0
            while first < counts[number]:
                chunk, at = divmod(start + first, size)
                last = min(first + size - at, counts[number])
                chunks[chunk].append(Piece(number, first, last, at))
                first = last
        return cls(size, total, starts, tuple(map(tuple, chunks)))


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit
