"""Files of runs and sweeps in memory, so that the dashboard reads again only what has changed in a folder.

Runs in: the dashboard's threads. Thread-safe. Must not import torch or ray.

A segment of steps or telemetry (*.parquet) is not changed once it is complete; events (*.jsonl) are only appended to.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from raydist.storage import Storage

if TYPE_CHECKING:
    import pyarrow.fs as pafs

MOST_BYTES = 1 << 27
"""Of all files that are kept."""
SETTLED_S = 60.0
"""A segment is kept if it has not changed for so long: times of files on object stores are whole seconds, and clocks differ."""
UNUSED_S = 600.0
"""A file that was not asked for during this time makes room; until then newer ones are not kept. So a run that is larger than
MOST_BYTES has a part in memory, instead of files that replace each other in turn."""
_OVERLAP = 4096
"""Bytes at the end of the known events that are read again: if they differ, the file was written anew."""


class KeptFiles:
    """The bytes of files, each with what tells whether it has changed."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most = most
        self._files: OrderedDict[tuple[str, str], tuple[float, object, bytes]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: tuple[str, str], stamp: object = None) -> bytes | None:
        """The file, if it is kept with that stamp."""
        with self._lock:
            _, known, data = self._files.get(key, (0.0, None, None))
            if data is None or known != stamp:
                return None
            self._files[key] = time.monotonic(), known, data
            self._files.move_to_end(key)
            return data

    def keep(self, key: tuple[str, str], data: bytes, stamp: object = None) -> None:
        """Keeps the file in place of an earlier version, if there is room."""
        with self._lock:
            if key in self._files:
                self._drop(key)
            while self._files and self._bytes + len(data) > self._most:
                oldest = next(iter(self._files))
                if time.monotonic() - self._files[oldest][0] < UNUSED_S:
                    return
                self._drop(oldest)
            if len(data) <= self._most:
                self._files[key] = time.monotonic(), stamp, data
                self._bytes += len(data)

    def _drop(self, key: tuple[str, str]) -> None:
        self._bytes -= len(self._files.pop(key)[2])


class KeptStorage(Storage):
    """A folder whose files are read once, as long as they do not change. What is written goes to the folder as always."""

    def __init__(self, storage: Storage, kept: KeptFiles) -> None:
        vars(self).update(vars(storage))  # another connection to an object store would take time
        self._kept = kept
        self._listed: dict[str, object] = {}
        """Of segments in the last listing, each for one reading: a kept file is taken only after a look whether it has changed."""

    def at(self, name: str) -> Storage:
        """The folder `name` inside this one, with the same kept files."""
        return KeptStorage(super().at(name), self._kept)

    def read(self, name: str) -> bytes:
        """As Storage.read."""
        key = (self.full_uri, name)
        if name.endswith(".jsonl"):
            return self._appended(key, name)
        stamp = self._listed.pop(name, None)
        data = self._kept.get(key, stamp) if stamp else None
        if data is None:
            data = super().read(name)
            if stamp:
                self._kept.keep(key, data, stamp)
        return data

    def open(self, name: str) -> pa.NativeFile:
        """As Storage.open."""
        return pa.BufferReader(self.read(name)) if name in self._listed else super().open(name)

    def _appended(self, key: tuple[str, str], name: str) -> bytes:
        data = self._kept.get(key)
        if data is not None:
            start = max(len(data) - _OVERLAP, 0)
            with self.open(name) as file:
                file.seek(min(start, file.size()))
                newer = file.read()
            data = data[:start] + newer if newer.startswith(data[start:]) else None
        if data is None:
            data = super().read(name)
        self._kept.keep(key, data)
        return data

    def _list(self, folder: str, recursive: bool, unfinished: bool = False) -> Iterator[tuple[str, pafs.FileInfo]]:
        for name, info in super()._list(folder, recursive, unfinished):
            if name.endswith(".parquet") and info.mtime_ns and time.time() - info.mtime_ns / 1e9 > SETTLED_S:
                self._listed[name] = info.size, info.mtime_ns
            else:
                self._listed.pop(name, None)
            yield name, info
