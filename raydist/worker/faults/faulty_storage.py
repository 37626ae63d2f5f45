"""Storage that fails on request: an injected fault on a rank, for tests and for users who test how their job recovers.

Runs in: a rank of a run with faults. Neither torch nor ray.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from raydist import faults
from raydist.storage import Sink, Storage

_ERRNO = {"disk_full": errno.ENOSPC, "read_only": errno.EROFS, "storage_gone": errno.EIO}
_OPERATIONS = {"disk_full": {"write"}, "read_only": {"write", "delete"}}


@dataclass(slots=True)
class _ActiveFault:
    """A storage fault that is active."""

    fault: faults.StorageFault
    until: float | None
    left: int | None


class Illness:
    """The storage faults that are active."""

    def __init__(self) -> None:
        self._active: list[_ActiveFault] = []
        self._lock = threading.Lock()

    def catch(self, fault: faults.StorageFault) -> None:
        """Starts a fault."""
        until = None if fault.seconds is None else time.monotonic() + fault.seconds
        with self._lock:
            self._active.append(_ActiveFault(fault, until, fault.operations))

    def met(self, operation: str) -> faults.StorageFault | None:
        """The fault for a "read", "write" or "delete" now, or None."""
        with self._lock:
            now = time.monotonic()
            self._active = [f for f in self._active if f.left != 0 and (f.until is None or now < f.until)]
            for active in self._active:
                if operation in _OPERATIONS.get(active.fault.fault, {operation}):
                    active.left = None if active.left is None else active.left - 1
                    return active.fault
        return None


class _FaultyStorage(Storage):
    """A Storage with injected faults; without an active one it works as usual."""

    def __init__(self, uri: str, ill: Illness) -> None:
        super().__init__(uri)
        self._ill = ill

    def _meet(self, operation: str, name: str) -> faults.StorageFault | None:
        """Raises StorageError, or sleeps. Returns a full disk, because that error occurs in the middle of a file."""
        fault = self._ill.met(operation)
        if isinstance(fault, faults.SlowStorage):
            time.sleep(fault.delay)
        elif fault is not None and not isinstance(fault, faults.DiskFull):
            raise self._failed(operation, name, OSError(_ERRNO[fault.fault], ""))
        return fault

    @contextmanager
    def create(self, name: str, check: Callable[[], object] | None = None) -> Iterator[Sink]:
        fault = self._meet("write", name)
        with super().create(name, check) as sink:
            yield _FullDisk(sink) if isinstance(fault, faults.DiskFull) else sink

    def write_new(self, name: str, data: bytes) -> bool:
        if isinstance(self._meet("write", name), faults.DiskFull):
            raise self._failed("write", name, OSError(errno.ENOSPC, ""))
        return super().write_new(name, data)

    def read(self, name: str) -> bytes:
        self._meet("read", name)
        return super().read(name)

    def open(self, name: str) -> Any:
        self._meet("read", name)
        return super().open(name)

    def _info(self, name: str) -> Any:
        self._meet("read", name)
        return super()._info(name)

    def _list(self, folder: str, recursive: bool, unfinished: bool = False) -> Iterator[tuple[str, Any]]:
        self._meet("read", folder)
        return super()._list(folder, recursive, unfinished)

    def delete(self, name: str) -> None:
        self._meet("delete", name)
        super().delete(name)

    def delete_empty(self, folder: str) -> None:
        self._meet("delete", folder)
        super().delete_empty(folder)


class _FullDisk:
    """Writes half of the first data, then fails: no space left."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def write(self, data: bytes | memoryview, /) -> int:
        self._sink.write(memoryview(data)[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def ill_storage(uri: str, ill: Illness) -> Storage:
    """The Storage of `uri`, with the faults of `ill`."""
    return _FaultyStorage(uri, ill)
