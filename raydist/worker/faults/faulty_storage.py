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
from pathlib import Path
from typing import Any

from raydist import faults
from raydist.sinks import Sink
from raydist.storage import GONE, Storage

_ERRORS = {
    "no_inodes": OSError(errno.ENOSPC, ""),
    "read_only": OSError(errno.EROFS, ""),
    "storage_gone": OSError(errno.EIO, ""),
    "stale_storage": OSError(errno.ESTALE, ""),
    "busy_storage": OSError("503 Slow Down"),
}
_IN_A_FILE = {"disk_full": errno.ENOSPC, "cut_upload": errno.EPIPE}
_ONLY_WRITES = {"disk_full", "cut_upload", "no_inodes", "slow_disk", "read_only"}


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
                kind = active.fault.fault
                spared = operation == "read" or (operation == "delete" and kind != "read_only")
                if kind not in _ONLY_WRITES or not spared:
                    active.left = None if active.left is None else active.left - 1
                    return active.fault
        return None

    def wait(self, fault: faults.StorageFault) -> None:
        """Returns once this fault is over."""
        with self._lock:
            ends = [active.until for active in self._active if active.fault is fault and active.until is not None]
        time.sleep(max(0.0, max(ends, default=0.0) - time.monotonic()))


class _FaultyStorage(Storage):
    """A Storage with injected faults; without an active one it works as usual."""

    def __init__(self, healthy: Storage, ill: Illness) -> None:
        super().__init__(healthy.full_uri)
        self.private, self.marks, self._ill = healthy.private, healthy.marks, ill

    def _meet(self, operation: str, name: str) -> faults.StorageFault | None:
        """Raises StorageError, or sleeps. Returns a fault whose error occurs in the middle of a file."""
        fault = self._ill.met(operation)
        if isinstance(fault, faults.SlowStorage):
            time.sleep(fault.delay)
        elif isinstance(fault, faults.HangingStorage):
            self._ill.wait(fault)
        elif isinstance(fault, faults.UnmountedStorage):
            if operation == "write":
                raise self._failed(operation, name, FileNotFoundError(GONE))
        elif fault is not None and fault.fault in _ERRORS:
            raise self._failed(operation, name, _ERRORS[fault.fault])
        return fault

    @contextmanager
    def create(self, name: str, check: Callable[[], object] | None = None) -> Iterator[Sink]:
        fault = self._meet("write", name)
        with super().create(name, check) as sink:
            if fault is not None and fault.fault in _IN_A_FILE:
                yield _CutShort(sink, _IN_A_FILE[fault.fault])
            else:
                yield _SlowDisk(sink, fault.bytes_per_s) if isinstance(fault, faults.SlowDisk) else sink

    def write_new(self, name: str, data: bytes) -> bool:
        fault = self._meet("write", name)
        if fault is not None and fault.fault in _IN_A_FILE:
            raise self._failed("write", name, OSError(_IN_A_FILE[fault.fault], ""))
        return super().write_new(name, data)

    def appendable(self, name: str) -> Path:
        self._meet("write", name)
        return super().appendable(name)

    def read(self, name: str) -> bytes:
        if isinstance(self._meet("read", name), faults.UnmountedStorage):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return super().read(name)

    def open(self, name: str) -> Any:
        if isinstance(self._meet("read", name), faults.UnmountedStorage):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return super().open(name)

    def _info(self, name: str) -> Any:
        found = super()._info(name)
        if isinstance(self._meet("read", name), faults.UnmountedStorage):
            return type(found)(self.path(name), type=self._type.NotFound)
        return found

    def _list(self, folder: str, recursive: bool, unfinished: bool = False) -> Iterator[tuple[str, Any]]:
        if isinstance(self._meet("read", folder), faults.UnmountedStorage):
            return iter(())
        return super()._list(folder, recursive, unfinished)

    def delete(self, name: str) -> None:
        if not isinstance(self._meet("delete", name), faults.UnmountedStorage):
            super().delete(name)

    def delete_empty(self, folder: str) -> None:
        if not isinstance(self._meet("delete", folder), faults.UnmountedStorage):
            super().delete_empty(folder)


class _CutShort:
    """Writes half of the first data, then fails with that error."""

    def __init__(self, sink: Sink, number: int) -> None:
        self._sink, self._number = sink, number

    def write(self, data: bytes | memoryview, /) -> int:
        self._sink.write(memoryview(data)[: len(data) // 2])
        raise OSError(self._number, os.strerror(self._number))


class _SlowDisk:
    """Takes so long for what it writes."""

    def __init__(self, sink: Sink, bytes_per_s: int) -> None:
        self._sink, self._bytes_per_s = sink, bytes_per_s

    def write(self, data: bytes | memoryview, /) -> int:
        time.sleep(memoryview(data).nbytes / self._bytes_per_s)
        return self._sink.write(data)


def ill_storage(healthy: Storage, ill: Illness) -> Storage:
    """The same storage, with the faults of `ill`."""
    return _FaultyStorage(healthy, ill)
