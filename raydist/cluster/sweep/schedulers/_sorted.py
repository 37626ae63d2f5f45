"""A sorted list of numbers.

Runs anywhere. Pure.
"""

from __future__ import annotations

from array import array
from bisect import insort


class Ordered:
    """A sorted list of float64. Adding a number to 10,000 moves 40 KB on average, in 1 to 2 microseconds."""

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers = array("d")

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, number: float) -> None:
        """Inserts a number, which must be finite."""
        insort(self._numbers, number)

    def quantile(self, share: float) -> float:
        """The quantile with linear interpolation, as numpy.quantile. `share` in [0, 1]. The list must not be empty."""
        place = share * (len(self._numbers) - 1)
        below = int(place)
        low = self._numbers[below]
        high = self._numbers[min(below + 1, len(self._numbers) - 1)]
        return low + (high - low) * (place - below)
