"""What takes the bytes of a file.

Runs anywhere.
"""

from __future__ import annotations

from typing import Protocol


class Sink(Protocol):
    """The result of `Storage.create`: takes bytes in order."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Writes bytes; returns how many."""


def write_whole(sink: Sink, data: bytes | memoryview) -> None:
    """Writes all of `data`: a file that is not buffered may take a part of it at a time."""
    rest = memoryview(data)
    while rest:
        rest = rest[sink.write(rest) or len(rest) :]
