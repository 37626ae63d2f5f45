"""Keeps what Ray logs and prints off the user's terminal: it goes to a file.

Runs in: the driver.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO, cast

from raydist.display import Display
from raydist.storage import opener


@contextlib.contextmanager
def into_file(path: Path) -> Iterator[None]:
    """Appends to `path`: Ray's loggers, prints of Ray's threads, and what native code writes to descriptor 2.

    sys.stderr keeps writing to the earlier target of descriptor 2, so Python's own messages still reach the user.
    """
    import ray  # noqa: F401  # the import adds a handler to Ray's logger, which is then replaced

    sys.stderr.flush()
    with open(path, "a", buffering=1, opener=opener) as file, contextlib.ExitStack() as stack:
        kept = os.dup(2)
        stack.callback(os.close, kept)
        if _fileno(sys.stderr) == 2:
            stack.callback(setattr, sys, "stderr", sys.stderr)
            raw = os.fdopen(kept, "wb", buffering=0, closefd=False)
            text = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
            sys.stderr = cast(TextIO, Display(text))
        os.dup2(file.fileno(), 2)
        stack.callback(os.dup2, kept, 2)
        stack.callback(setattr, sys, "stdout", sys.stdout)
        sys.stdout = WithoutRay(sys.stdout, file)
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger = logging.getLogger("ray")
        stack.callback(_set_handlers, logger, logger.handlers[:], logger.propagate)
        _set_handlers(logger, [handler], False)
        yield


class WithoutRay:
    """A stream that writes to another one; what Ray's listener threads print goes to a file instead."""

    def __init__(self, stream: TextIO, file: TextIO) -> None:
        self._stream, self._file = stream, file

    def write(self, text: str) -> int:
        """To the file, if one of Ray's threads calls."""
        from_ray = threading.current_thread().name.startswith("ray_")
        return (self._file if from_ray else self._stream).write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _set_handlers(logger: logging.Logger, handlers: list[logging.Handler], propagate: bool) -> None:
    logger.handlers, logger.propagate = handlers, propagate


def _fileno(stream: Any) -> int | None:
    try:
        return int(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return None
