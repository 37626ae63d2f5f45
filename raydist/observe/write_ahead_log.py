"""Keeps in host memory what a run's monitor has received and not yet stored, so that nothing is lost if the monitor is killed.

Runs in: the run's monitor. Must not import ray or torch.

    entry -> the run log's buffers, and a line here -> answer ... the run log is flushed -> the older lines are deleted

The lines are in /dev/shm/raydist-<uid>-journal-<run and driver>.jsonl, readable by this user only. The monitor deletes the file
when it ends. If the monitor and its driver were killed, the run's next monitor on the host takes its events over; that of another
run deletes it after an hour.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from raydist.private_files import open_private
from raydist.run.driver_process import gone

SHM = Path("/dev/shm")
KEPT_S = 3600.0
"""How long the events of a killed driver are kept for the next driver of its run."""
EARLIER = "earlier"
"""The key of an entry with an event that an earlier driver's monitor has received."""


class WriteAheadLog:
    """The log of the run at `run_uri` under `driver` (from `this_process()`). Continues an existing file. Thread-safe.

    `before`: the driver that wrote the run's state last. If it was killed on this host together with its monitor, their events are
    the first entries: [{EARLIER: ...}]. Raises OSError if the host's memory is full.
    """

    def __init__(self, run_uri: str, driver: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> None:
        self._head, self._path = _place(run_uri, driver)
        earlier = _place(run_uri, before)[1] if before and before != driver else None
        for path in self._path.parent.glob(f"{_prefix()}*"):
            if path != earlier:
                _remove_unused(path)
        self.continued = self._path.exists()
        """Whether another monitor of this driver has begun it: that one was killed."""
        self._lock = threading.Lock()
        self._gone = 0
        """Bytes deleted from its start so far; marks include them."""
        self._files = [self._open(self._path)]
        """The open descriptor; empty once closed. A list, because the finalizer needs the newest descriptor."""
        self._drop = weakref.finalize(self, _drop, self._files, self._path)
        # Cut off a torn last line, else the next line would be appended to it. Its sender got no answer, and sends it again.
        os.ftruncate(self._files[0], _read(self._files[0]).rfind(b"\n") + 1)
        if earlier is not None:
            self._take_over(earlier)

    def _take_over(self, path: Path) -> None:
        """Not the file's steps and attempts: their numbers are given again. Nothing if its driver or its monitor may be alive."""
        try:
            file = open_private(path)
        except OSError:  # there is none
            return
        with os.fdopen(file, "rb"), suppress(BlockingIOError, ValueError, KeyError, TypeError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lines = _read(file).split(b"\n")[:-1]
            if gone(json.loads(lines[0])["driver"]) and os.path.samestat(os.fstat(file), path.lstat()):
                for entry in map(json.loads, lines[1:]):
                    if (event := entry.get("event", entry.get(EARLIER))) is not None:
                        self.add({EARLIER: event})
                path.unlink()

    def left(self) -> list[dict[str, Any]]:
        """The entries in the file, in order."""
        return [json.loads(line) for line in _read(self._files[0])[len(self._head) :].splitlines()]

    def add(self, entry: Mapping[str, Any]) -> None:
        """Appends an entry of plain values. Call it after the run log has the entry: see `stored`."""
        with self._lock:
            if self._files:
                _write(self._files[0], _line(entry))

    def mark(self) -> int:
        """A mark for `stored`: everything added before it is in the run log's buffers, and the next flush makes it durable."""
        with self._lock:
            return self._gone + os.fstat(self._files[0]).st_size if self._files else 0

    def stored(self, mark: int) -> None:
        """Everything added before that mark is durable: deletes it."""
        with self._lock:
            end = mark - self._gone
            if not self._files or end <= len(self._head):
                return  # closed, or another flush has passed a later mark
            file = self._files[0]
            size = os.fstat(file).st_size
            if end == size:
                os.ftruncate(file, len(self._head))
            else:  # atomic, because this process may be killed at any point
                part = self._path.with_suffix(".part")
                part.unlink(missing_ok=True)
                new = self._open(part)
                _write(new, os.pread(file, size - end, end))
                part.replace(self._path)
                os.close(file)
                self._files[0] = new
            self._gone += end - len(self._head)

    def close(self) -> None:
        """Everything is durable or abandoned: later entries are ignored."""
        with self._lock:
            self._drop()

    def _open(self, path: Path) -> int:
        file = open_private(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        with suppress(BlockingIOError):  # its monitor was killed, and still exits
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as long as this monitor lives
        if not os.fstat(file).st_size:
            _write(file, self._head)
        return file


def _prefix() -> str:
    return f"raydist-{os.getuid()}-journal-"


def _place(run_uri: str, driver: Mapping[str, Any]) -> tuple[bytes, Path]:
    """The first line of that log, and its file."""
    head = _line({"driver": dict(driver)})
    root = SHM if SHM.is_dir() else Path(tempfile.gettempdir())
    key = xxhash.xxh3_128_hexdigest(run_uri.encode() + b"\n" + head)
    return head, root / f"{_prefix()}{key}.jsonl"


def _drop(files: list[int], path: Path) -> None:
    os.close(files.pop())
    path.unlink(missing_ok=True)


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, default=str).encode() + b"\n"


def _write(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def _read(file: int) -> bytes:
    return os.pread(file, os.fstat(file).st_size, 0)


def _remove_unused(path: Path, kept_s: float = KEPT_S) -> None:
    """Deletes the file, unless its driver may be alive, or it was written in the last `kept_s` seconds."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        with os.fdopen(open_private(path), "rb") as file:
            driver = json.loads(file.readline())["driver"]
        if gone(driver) and time.time() - path.lstat().st_mtime >= kept_s:
            path.unlink()
