"""What commands show while they work: on a stream that may be lost.

Runs anywhere. Must stay light.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TextIO


class Display:
    """A stream in place of sys.stderr that may be lost (a terminal that is gone, a closed pipe, a full disk): no run ends for what
    it shows."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes it, if the stream still takes it."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream, if it still takes what it has."""
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
