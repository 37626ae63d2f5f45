"""A rank's output: passed to the worker's own log at once, and written to the run's folder, where `raydist logs` reads it.

Runs in: each rank's agent. Imports neither ray nor torch.

    rank --stdout and stderr, a pipe--> agent --+--> the agent's own stdout, which Ray stores on the node
                                                +--> RUN/logs/attempt-0002/rank-00003.log

A rank never waits for storage: if storage is too slow, the oldest output is dropped, and a line in the log reports it.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

from raydist.errors import RaydistError
from raydist.redact import redact
from raydist.run.directory import RunDir
from raydist.run.rank_logs import name
from raydist.storage import Storage

INTERVAL_S = 1.0
REMOTE_INTERVAL_S = 5.0
"""For object stores, where each write uploads the newest part again."""
PART_BYTES = 1 << 20
WAITING_BYTES = 8 << 20
_LAST_TRIES = 5
MOST_BYTES = 256 << 20
"""Maximum per rank and attempt; later output is only in Ray's log of the worker."""


class Output:
    """Give `fd`, the pipe's write end, to the rank; then call `begin`. `run`: the full URI of the run's folder."""

    def __init__(self, run: str, attempt: int, rank: int, interval_s: float | None = None) -> None:
        self._run, self._attempt, self._rank = run, attempt, rank
        self._storage: Storage | None = None
        """Opened at the first line: opening takes a quarter of a second, and most ranks print nothing."""
        remote = "://" in run and not run.startswith("file://")
        self._interval_s = interval_s or (REMOTE_INTERVAL_S if remote else INTERVAL_S)
        self._source, self.fd = os.pipe()
        self._waiting = bytearray()
        self._dropped = 0
        self._ended = False
        self._changed = threading.Condition()
        """Guards the three fields above; never held during storage I/O."""
        self._stored = 0
        self._part, self._sent = 1, b""
        self._writer = threading.Thread(target=self._write, name="raydist-output", daemon=True)

    def begin(self) -> None:
        """The rank has its copy of `fd`: closes this one, so that the pipe ends when the rank exits."""
        os.close(self.fd)
        threading.Thread(target=self._read, name="raydist-output-pipe", daemon=True).start()
        self._writer.start()

    def abandon(self) -> None:
        """Closes the pipe, because no rank was started."""
        os.close(self.fd)
        os.close(self._source)

    def wait(self, timeout_s: float) -> None:
        """Returns once everything that the rank printed is on storage, or after `timeout_s`."""
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
                    self._changed.wait_for(lambda: self._ended or self._waiting)  # if it prints nothing: until it ends
                self._changed.wait_for(lambda: self._ended, self._interval_s)
                ended = self._ended
            if ended and tries:
                time.sleep(self._interval_s)  # storage may work again
            text = text or self._take()
            if text:
                try:
                    self._put(text)
                    self._stored, text, tries = self._stored + len(text), b"", 0
                except RaydistError:
                    tries += 1

    def _take(self) -> bytes:
        """The next text to write: whole lines, because secrets are only recognised as a whole. Each state of a progress bar, which
        ends with a carriage return, is one."""
        with self._changed:
            end = len(self._waiting)
            if not self._ended:
                end = max(self._waiting.rfind(b"\n"), self._waiting.rfind(b"\r")) + 1
            data, dropped = bytes(self._waiting[:end]), self._dropped
            del self._waiting[:end]
            if data:  # else the text that reports it is yet to come
                self._dropped = 0
        if not data or self._stored > MOST_BYTES:
            return b""
        text = redact(data.decode(errors="surrogateescape")).encode(errors="surrogateescape")
        if dropped:
            text = _note(f"{dropped} bytes are missing here: storage did not take them in time") + text
        if self._stored + len(text) > MOST_BYTES:
            text += _note(f"more than {MOST_BYTES >> 20} MiB: the rest is only in Ray's log of this worker")
        return text

    def _put(self, text: bytes) -> None:
        storage = self._storage = self._storage or RunDir(self._run).expect().storage
        path = name(self._attempt, self._rank, self._part)
        if storage.local is None:
            storage.write(path, self._sent + text)
            self._sent += text
            if len(self._sent) >= PART_BYTES:
                self._part, self._sent = self._part + 1, b""
            return
        storage.append(path, text)


def _note(text: str) -> bytes:
    return f"[raydist: {text}]\n".encode()
