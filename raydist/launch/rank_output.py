"""What a rank prints: on to the worker's own log at once, and soon after into the run's folder, where `raydist logs` reads it.

Runs in: each rank's agent. Imports neither ray nor torch.

    rank --stdout and stderr, a pipe--> agent --+--> the agent's own stdout, which Ray keeps on the node
                                                +--> RUN/logs/attempt-0002/rank-00003.log

A rank never waits for storage: what storage does not take in time is dropped, oldest first, and a line says so.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

from raydist.errors import RaydistError, StorageError
from raydist.redact import redact
from raydist.run.rank_logs import name
from raydist.storage import Storage

INTERVAL_S = 1.0
REMOTE_INTERVAL_S = 5.0
"""On an object store, where each write sends the newest part again."""
PART_BYTES = 1 << 20
WAITING_BYTES = 8 << 20
_LAST_TRIES = 5
MOST_BYTES = 256 << 20
"""Of one rank in one attempt; what it prints after that is in Ray's log of its worker alone."""


class Output:
    """`fd` is the end that the rank writes to: give it to the rank, then call `begin`. `run`: the full URI of the run's folder."""

    def __init__(self, run: str, attempt: int, rank: int, interval_s: float | None = None) -> None:
        self._run, self._attempt, self._rank = run, attempt, rank
        self._storage: Storage | None = None
        """Opened for the first line: that takes a quarter of a second, and most ranks print nothing."""
        remote = "://" in run and not run.startswith("file://")
        self._interval_s = interval_s or (REMOTE_INTERVAL_S if remote else INTERVAL_S)
        self._source, self.fd = os.pipe()
        self._waiting = bytearray()
        self._dropped = 0
        self._ended = False
        self._changed = threading.Condition()
        """Guards the three above; never held while storage works."""
        self._stored = 0
        self._part, self._sent = 1, b""
        self._writer = threading.Thread(target=self._write, name="raydist-output", daemon=True)

    def begin(self) -> None:
        """The rank has its copy of `fd`: this one is closed, so that the rank's end is seen."""
        os.close(self.fd)
        threading.Thread(target=self._read, name="raydist-output-pipe", daemon=True).start()
        self._writer.start()

    def abandon(self) -> None:
        """There is no rank."""
        os.close(self.fd)
        os.close(self._source)

    def wait(self, timeout_s: float) -> None:
        """Returns once all that the rank printed is on storage; or after that time."""
        self._writer.join(timeout_s)

    def _read(self) -> None:
        while data := os.read(self._source, 1 << 16):
            with suppress(OSError):
                os.write(1, data)
            with self._changed:
                self._waiting += data
                if (over := len(self._waiting) - WAITING_BYTES) > 0:
                    del self._waiting[:over]
                    self._dropped += over
                self._changed.notify_all()
        os.close(self._source)
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _write(self) -> None:
        text, ended, tries = b"", False, 0
        while not ended or (text and tries < _LAST_TRIES):
            with self._changed:
                if not text:
                    self._changed.wait_for(
                        lambda: self._ended or self._waiting
                    )  # of a rank that prints nothing: to its end
                self._changed.wait_for(lambda: self._ended, self._interval_s)
                ended = self._ended
            if ended and tries:
                time.sleep(self._interval_s)  # what refused a moment ago may be back
            text = text or self._take()
            if text:
                try:
                    self._put(text)
                    self._stored, text, tries = self._stored + len(text), b"", 0
                except RaydistError:
                    tries += 1

    def _take(self) -> bytes:
        """What is to be written next: whole lines, for a secret is recognised as a whole."""
        with self._changed:
            end = len(self._waiting) if self._ended else self._waiting.rfind(b"\n") + 1
            data, dropped = bytes(self._waiting[:end]), self._dropped
            del self._waiting[:end]
            self._dropped = 0
        if not data or self._stored > MOST_BYTES:
            return b""
        text = redact(data.decode(errors="surrogateescape")).encode(errors="surrogateescape")
        if dropped:
            text = _word(f"{dropped} bytes are missing here: storage did not take them in time") + text
        if self._stored + len(text) > MOST_BYTES:
            text += _word(f"more than {MOST_BYTES >> 20} MiB: the rest is in Ray's log of this worker alone")
        return text

    def _put(self, text: bytes) -> None:
        storage = self._storage = self._storage or Storage(self._run)
        path = name(self._attempt, self._rank, self._part)
        if storage.local is None:
            storage.write(path, self._sent + text)
            self._sent += text
            if len(self._sent) >= PART_BYTES:
                self._part, self._sent = self._part + 1, b""
            return
        place = storage.local / path
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with open(place, "ab", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                try:
                    rest = memoryview(text)
                    while rest:
                        rest = rest[file.write(rest) :]
                except OSError:
                    os.ftruncate(file.fileno(), size)  # a full disk took a part: the next try must not repeat it
                    raise
        except OSError as error:
            raise StorageError(f"cannot write {place}: {error.strerror}", "") from error


def _word(text: str) -> bytes:
    return f"[raydist: {text}]\n".encode()
