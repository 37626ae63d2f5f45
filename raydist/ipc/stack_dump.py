"""Where a rank's threads are, and which collectives it has started: asked from outside, whatever state it is in.

The rank calls `answer` once; its agent has a `Witness`. Runs in: each train worker. Never ray; torch only in the rank.

Python stacks come by a signal, whose handler is C and needs no GIL; a stopped process prints none. What torch's flight recorder
has comes from a thread of the rank's, and so only if Python can run one.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import raydist

_SIGNAL = signal.SIGUSR2
_STACKS_S = 1.0
_RECORD_S = 2.0
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (\S+)')
_NOT_THE_USERS = (str(Path(raydist.__file__).parent) + os.sep, "/site-packages/", "/lib/python3", "<frozen", "<string>")


def answer(stacks_fd: int, control: socket.socket) -> None:
    """From now on this process prints its stacks to that file when signalled, and its collectives when asked by the socket."""
    faulthandler.register(_SIGNAL, file=stacks_fd, all_threads=True, chain=False)

    def serve() -> None:
        while control.recv(16):
            control.sendall(json.dumps(_collectives()).encode() + b"\n")

    threading.Thread(target=serve, name="raydist-answers", daemon=True).start()


def _collectives() -> list[list[Any]]:
    """[group, number, operation and sizes] of what torch's flight recorder holds, oldest first."""
    from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

    entries = json.loads(_dump_fr_trace_json(True, False)).get("entries", [])
    return [
        [
            # A name that all ranks have for it, and what it is for, if torch was told.
            " ".join(n for n in entry.get("process_group", []) if n != "undefined") or str(entry.get("pg_id")),
            entry.get("collective_seq_id", entry.get("seq_id", 0)),
            f"{entry.get('profiling_name')} of {entry.get('input_sizes')}",
        ]
        for entry in entries
    ]


class Witness:
    """Looks at one rank. `stacks_fd` and `control` are the other ends of what the rank's `answer` got."""

    def __init__(self, pid: int, stacks_fd: int, control: socket.socket) -> None:
        self._pid, self._stacks_fd, self._control = pid, stacks_fd, control

    def state(self) -> str:
        """The letter of /proc/PID/stat; "Z" if it is gone."""
        try:
            return Path(f"/proc/{self._pid}/stat").read_text().rpartition(") ")[2][0]
        except OSError:
            return "Z"

    def stacks(self) -> str:
        """Python's stacks of all threads; "" if the process cannot run."""
        os.ftruncate(self._stacks_fd, 0)
        os.lseek(self._stacks_fd, 0, os.SEEK_SET)
        try:
            os.kill(self._pid, _SIGNAL)
        except ProcessLookupError:
            return ""
        size, deadline = 0, time.monotonic() + _STACKS_S
        while time.monotonic() < deadline:
            time.sleep(0.05)  # it tells nobody when it is done
            now = os.fstat(self._stacks_fd).st_size
            if now and now == size:
                break
            size = now
        return os.pread(self._stacks_fd, 1 << 20, 0).decode(errors="replace")

    def collectives(self) -> list[list[Any]] | None:
        """[group, number, operation and sizes], oldest first; None if no thread of the rank answers in 2 s."""
        self._control.settimeout(_RECORD_S)
        try:
            self._control.sendall(b"?")
            data = b""
            while not data.endswith(b"\n"):
                piece = self._control.recv(1 << 20)
                if not piece:
                    return None
                data += piece
        except OSError:
            return None
        found: list[list[Any]] = json.loads(data)
        return found


def where(stacks: str, main: int) -> str:
    """The innermost line of the main thread that is the user's own; if it has none, the innermost. "" without a stack."""
    for block in stacks.split("\n\n"):
        if f"{main:#018x}" in block:
            frames = _FRAME.findall(block)
            if not frames:
                return ""
            users = (f for f in frames if not any(part in f[0] for part in _NOT_THE_USERS))
            path, line, function = next(users, frames[0])
            return f"{path}:{line} in {function}"
    return ""
