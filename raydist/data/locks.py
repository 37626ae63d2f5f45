"""Limits work to one process per host: an advisory lock on a file, released by the kernel when its holder dies.

Runs anywhere that has POSIX locks.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raydist.errors import StorageError


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of that file, which is created with its folder; waits while another process has it. Raises StorageError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab")  # noqa: SIM115  (closed below, which also unlocks it)
    except OSError as error:
        raise StorageError(f"cannot lock {path}: {error.strerror}", "") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
