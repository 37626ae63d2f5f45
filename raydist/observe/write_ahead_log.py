"""Keeps in host memory what a run's monitor has received and not yet stored, so that nothing is lost if the monitor is killed.

Runs in: the run's monitor; `main` in a process that outlives it. Must not import ray or torch.

    entry -> the run log's buffers, and a line here -> answer ... the run log is flushed -> the older lines are deleted

The lines are in /dev/shm/raydist-<uid>-journal-<run and driver>.jsonl, readable by this user only. The monitor deletes the file
when it ends. If the monitor and its driver were killed, a shell that has waited for that moves its events to RUN/journals, from
where the run's next monitor takes them over, on any host. If the shell was killed too, or storage refuses them, the file stays for
the run's next monitor on this host; that of another run deletes it after an hour.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from raydist.errors import StorageError
from raydist.parsing import DAMAGED, parse_json
from raydist.private_files import open_private
from raydist.records import Event
from raydist.run.directory import JOURNALS, RunDir
from raydist.run.driver_process import gone

SHM = Path("/dev/shm")
KEPT_S = 3600.0
"""How long the events of a killed driver are kept for the next driver of its run."""
EARLIER = "earlier"
"""The key of an entry with an event that an earlier driver's monitor has received."""
_URI = "RAYDIST_RUN_URI"
_DRIVER_S = 60.0
"""So long after its monitor a driver may end, and its journal is still moved. Else the run goes on, with a new monitor."""
_LOOK_S = 0.2
_PART = ".part"
_KEEPER = 'exec 3<&0; { read -r _ <&3; cd /; [ -e "$1" ] && exec "$2" -P -c "$3" "$4" "$1"; } > /dev/null 2>&1 &'
"""Waits until the other end of its pipe is closed. In the background, because Ray kills the children of a worker that ends."""
_START = "import sys; sys.path.append(sys.argv.pop(1)); from raydist.observe.write_ahead_log import main; main()"
_RAYDIST = str(Path(__file__).parents[2])
"""For a process with another path than this one's, as of a checkout that is not installed."""


class WriteAheadLog:
    """The log of the run at `run_uri` under `driver` (from `this_process()`). Continues an existing file. Thread-safe.

    `before`: the driver that wrote the run's state last. If it was killed on this host together with its monitor, their events are
    the first entries: [{EARLIER: ...}]. So are those in the run's folder. Raises OSError if the host's memory is full.
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
        self._drop = weakref.finalize(self, _drop, self._files, self._path, _start_keeper(run_uri, self._path))
        # Cut off a torn last line, else the next line would be appended to it. Its sender got no answer, and sends it again.
        os.ftruncate(self._files[0], _read(self._files[0]).rfind(b"\n") + 1)
        if earlier is not None:
            with suppress(OSError):  # there is none
                _take(earlier, self._add_earlier)
        if before:
            with suppress(StorageError):  # they stay for the next one
                self._take_stored(RunDir(run_uri).guard())

    def _take_stored(self, run: RunDir) -> None:
        for name in run.storage.files(JOURNALS):
            for line in run.storage.read(name).splitlines():
                with suppress(*DAMAGED):  # not written by raydist
                    self._add_earlier([Event.from_dict(parse_json(line)).to_dict()])
            run.storage.delete(name)

    def _add_earlier(self, events: list[Any]) -> None:
        for event in events:
            self.add({EARLIER: event})

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
                part = self._path.with_suffix(_PART)
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


def _start_keeper(run_uri: str, path: Path) -> int:
    """Starts a shell that calls `main` once this process has ended without `_drop`. Returns its pipe. If there can be no more
    processes there is none, and the file of a killed driver stays.

    The URI may have secrets: other users see the arguments of a process, but not its environment.
    """
    read, write = os.pipe()
    command = ["/bin/sh", "-c", _KEEPER, "raydist-journal", str(path), sys.executable, _START, _RAYDIST]
    with suppress(OSError):
        subprocess.run(command, stdin=read, env={**os.environ, _URI: run_uri}, start_new_session=True, check=False)
    os.close(read)
    return write


def _drop(files: list[int], path: Path, keeper: int) -> None:
    os.close(files.pop())
    path.unlink(missing_ok=True)
    os.close(keeper)


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, default=str).encode() + b"\n"


def _write(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def _read(file: int) -> bytes:
    return os.pread(file, os.fstat(file).st_size, 0)


def _take(path: Path, store: Callable[[list[Any]], None]) -> bool:
    """Passes the journal's events to `store`, and deletes the file; not its steps and attempts, whose numbers are given again.

    False if its driver or its monitor may be alive, or it is damaged. Raises OSError if there is none, and what `store` raises.
    """
    with os.fdopen(open_private(path), "rb") as file, suppress(BlockingIOError, *DAMAGED):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lines = _read(file.fileno()).split(b"\n")[:-1]
        if gone(json.loads(lines[0])["driver"]) and os.path.samestat(os.fstat(file.fileno()), path.lstat()):
            entries = map(json.loads, lines[1:])
            store([event for entry in entries if (event := entry.get("event", entry.get(EARLIER))) is not None])
            path.unlink()
            path.with_suffix(_PART).unlink(missing_ok=True)
            return True
    return False


def _remove_unused(path: Path) -> None:
    """Deletes the file, unless its driver may be alive, or it was written in the last KEPT_S seconds."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        with os.fdopen(open_private(path), "rb") as file:
            driver = json.loads(file.readline())["driver"]
        if gone(driver) and time.time() - path.lstat().st_mtime >= KEPT_S:
            path.unlink()


def main() -> None:
    """Moves the events of the journal sys.argv[1], whose monitor has ended, to the run's folder, if its driver ends too.

    The file is gone then; else it stays. Raises StorageError.
    """
    path, run = Path(sys.argv[1]), RunDir(os.environ[_URI])

    def store(events: list[Any]) -> None:
        if events:
            run.guard().storage.write(f"{JOURNALS}/{path.name}", b"".join(map(_line, events)))

    deadline = time.monotonic() + _DRIVER_S
    with suppress(FileNotFoundError):  # the next monitor has been faster
        while not _take(path, store) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
