"""What a run's monitor was told and has not yet stored, in its host's memory: a monitor that is killed loses none of it.

Runs in: the run's monitor. Must not import ray or torch.

    told -> the log's buffers, and a line here -> answer ... the log is flushed -> the lines before that go

The lines are in /dev/shm/raydist-<uid>-journal-<run and driver>.jsonl, for this user alone. The file goes with the monitor, or, if
that was killed with its driver, with the next monitor on the host.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from raydist.run.status import gone

SHM = Path("/dev/shm")


class WriteAheadLog:
    """Of the run at that URI under that driver, as `this_process()` names it. Takes up what is there. From any thread.

    Raises OSError where the host's memory takes no more.
    """

    def __init__(self, run_uri: str, driver: Mapping[str, Any]) -> None:
        root = SHM if SHM.is_dir() else Path(tempfile.gettempdir())
        prefix = f"raydist-{os.getuid()}-journal-"
        for path in root.glob(f"{prefix}*"):
            _remove_unused(path)
        self._head = _line({"driver": dict(driver)})
        key = run_uri.encode() + b"\n" + self._head
        self._path = root / f"{prefix}{xxhash.xxh3_128_hexdigest(key)}.jsonl"
        self._lock = threading.Lock()
        self._gone = 0
        """Bytes that have gone from its begin: marks count them too."""
        self._files = [self._open(self._path)]
        """One descriptor, none once it is closed: in a list, for the end of this object needs the newest."""
        self._drop = weakref.finalize(self, _drop, self._files, self._path)
        # A torn last line goes, or the next one would follow on it: whoever told it had no answer, and tells it again.
        os.ftruncate(self._files[0], self._path.read_bytes().rfind(b"\n") + 1)

    def left(self) -> list[dict[str, Any]]:
        """What is there, in order."""
        return [json.loads(line) for line in self._path.read_bytes()[len(self._head) :].splitlines()]

    def add(self, told: Mapping[str, Any]) -> None:
        """Plain values. After what buffers them: see `stored`."""
        with self._lock:
            if self._files:
                _write(self._files[0], _line(told))

    def mark(self) -> int:
        """For `stored`; all that was added before is in the log's buffers, and the next flush makes it durable."""
        with self._lock:
            return self._gone + os.fstat(self._files[0]).st_size if self._files else 0

    def stored(self, mark: int) -> None:
        """What was added before that mark is durable, and goes."""
        with self._lock:
            end = mark - self._gone
            if not self._files or end <= len(self._head):
                return  # it is closed, or another flush has said so of more
            file = self._files[0]
            size = os.fstat(file).st_size
            if end == size:
                os.ftruncate(file, len(self._head))
            else:  # in one step, for this process may be killed in the midst of it
                part = self._path.with_suffix(".part")
                part.unlink(missing_ok=True)
                new = self._open(part)
                _write(new, os.pread(file, size - end, end))
                part.replace(self._path)
                os.close(file)
                self._files[0] = new
            self._gone += end - len(self._head)

    def close(self) -> None:
        """All is durable, or given up: what is added later is kept by nobody."""
        with self._lock:
            self._drop()

    def _open(self, path: Path) -> int:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        facts = os.fstat(file)
        if facts.st_uid != os.getuid():
            os.close(file)
            raise OSError(f"{path} is another user's")
        if not facts.st_size:
            _write(file, self._head)
        return file


def _drop(files: list[int], path: Path) -> None:
    os.close(files.pop())
    path.unlink(missing_ok=True)


def _line(told: Mapping[str, Any]) -> bytes:
    return json.dumps(told, default=str).encode() + b"\n"


def _write(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def _remove_unused(path: Path) -> None:
    """Unless its driver may be alive."""
    with suppress(OSError, ValueError, KeyError):
        with path.open("rb") as file:
            driver = json.loads(file.readline())["driver"]
        if gone(driver):
            path.unlink()
