"""Numbers in order, to which one is added at a time.

Runs anywhere. Pure.
"""

from __future__ import annotations

from array import array
from bisect import insort


class Ordered:
    """8 bytes a number. Adding one to 10,000 moves 40 KB on average: 1 to 2 microseconds."""

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers = array("d")

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, number: float) -> None:
        """Puts it in its place. It must be finite."""
        insort(self._numbers, number)

    def quantile(self, share: float) -> float:
        """The number below which that share of all lies, between two of them in proportion, as numpy.quantile has it.

        `share` in [0, 1]. There must be a number.
        """
        place = share * (len(self._numbers) - 1)
        below = int(place)
        low = self._numbers[below]
        high = self._numbers[min(below + 1, len(self._numbers) - 1)]
        return low + (high - low) * (place - below)
