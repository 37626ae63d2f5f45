"""What takes the bytes of a file.

Runs anywhere.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol


class Sink(Protocol):
    """The result of `Storage.create`: takes bytes in order."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Writes bytes; returns how many."""


def link(path: Path, to: Path) -> None:
    """A hard link. Raises OSError, FileExistsError only if `to` is another file: on NFS the answer to a link that was made may be
    lost, and the client, which asks again, is told that it exists.
    """
    try:
        os.link(path, to)
    except FileExistsError:
        if path.stat().st_nlink < 2:
            raise


def write_whole(sink: Sink, data: bytes | memoryview) -> None:
    """Writes all of `data`: a file that is not buffered may take a part of it at a time."""
    rest = memoryview(data)
    while rest:
        rest = rest[sink.write(rest) or len(rest) :]
