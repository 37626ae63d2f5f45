"""The stacks of a rank's threads, and the collectives it has started: read from another process, even if the rank hangs.

The rank calls `answer` once; its agent has a `Witness`. Runs in: each train worker. Never ray; torch only in the rank.

Python stacks come from a signal handler in C, which needs no GIL; a stopped process prints none. The records of torch's flight
recorder come from a thread of the rank, and only if Python can run that thread.
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
from itertools import chain
from pathlib import Path
from typing import Any

import raydist

_SIGNAL = signal.SIGUSR2
_STACKS_S = 1.0
_RECORD_S = 2.0
_RECORD_BYTES = 64 << 20
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (\S+)')
_RAYDIST = str(Path(raydist.__file__).parent) + os.sep
_NOT_USER_CODE = (_RAYDIST, "/site-packages/", "/lib/python3", "<frozen", "<string>")
_MEASURES = ("worker/metrics/", "worker/faults/")
"""Parts of raydist that are called around other code: their lines do not say what a rank does."""


def answer(stacks_fd: int, control: socket.socket) -> None:
    """From now on this process writes its stacks to that file on a signal, and its collectives to the socket on a request."""
    faulthandler.register(_SIGNAL, file=stacks_fd, all_threads=True, chain=False)

    def serve() -> None:
        while control.recv(16):
            control.sendall(json.dumps(_collectives()).encode() + b"\n")

    threading.Thread(target=serve, name="raydist-answers", daemon=True).start()


def _collectives() -> list[list[Any]]:
    """[group, number, operation and sizes] of the records in torch's flight recorder, oldest first."""
    from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

    entries = json.loads(_dump_fr_trace_json(True, False)).get("entries", [])
    return [
        [
            # Its name, the same on all ranks, and its description if torch has one.
            " ".join(n for n in entry.get("process_group", []) if n != "undefined") or str(entry.get("pg_id")),
            entry.get("collective_seq_id", entry.get("seq_id", 0)),
            _named(str(entry.get("profiling_name")), entry.get("input_sizes")),
        ]
        for entry in entries
        if not entry.get("is_p2p")  # transfers between pipeline stages, which ranks do not start alike
    ]


def _named(operation: str, sizes: Any) -> str:
    """A collective, as all its ranks have it: of a scatter or a gather only one rank has the sizes."""
    return operation if operation.partition(":")[2] in ("scatter", "gather") else f"{operation} of {sizes}"


class Witness:
    """Inspects one rank. `stacks_fd` and `control` are the other ends of the arguments of the rank's `answer`."""

    def __init__(self, pid: int, stacks_fd: int, control: socket.socket) -> None:
        self._pid, self._stacks_fd, self._control = pid, stacks_fd, control

    def state(self) -> str:
        """The state letter of /proc/PID/stat; "Z" if the process does not exist."""
        try:
            return Path(f"/proc/{self._pid}/stat").read_text().rpartition(") ")[2][0]
        except OSError:
            return "Z"

    def stacks(self) -> str:
        """The Python stacks of all threads; "" if the process cannot run."""
        os.ftruncate(self._stacks_fd, 0)
        os.lseek(self._stacks_fd, 0, os.SEEK_SET)
        try:
            os.kill(self._pid, _SIGNAL)
        except ProcessLookupError:
            return ""
        size, deadline = 0, time.monotonic() + _STACKS_S
        while time.monotonic() < deadline:
            time.sleep(0.05)  # faulthandler does not signal when it is done
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
            data = bytearray()
            while not data.endswith(b"\n"):
                piece = self._control.recv(1 << 20)
                if not piece or len(data) > _RECORD_BYTES:
                    return None
                data += piece
        except OSError:
            return None
        found: list[list[Any]] = json.loads(data)
        return found


def where(stacks: str, main: int) -> str:
    """The innermost line of the training thread in the user's code; else in raydist's, or at all. "" without a stack."""
    frames = _frames(stacks, main)
    if not frames:
        return ""
    users = (f for f in frames if not any(part in f[0] for part in _NOT_USER_CODE))
    ours = (
        f for f in frames if f[0].startswith(_RAYDIST) and not f[0].startswith(tuple(map(_RAYDIST.__add__, _MEASURES)))
    )
    path, line, function = next(chain(users, ours), frames[0])
    return f"{path}:{line} in {function}"


def waits(stacks: str, main: int) -> bool:
    """Whether the training thread is in `Work.wait`, which raydist/worker/metrics/collective_counters.py replaces."""
    innermost = _frames(stacks, main)[:1]
    return any(path.endswith("/collective_counters.py") and function == "wait" for path, _, function in innermost)


def _frames(stacks: str, main: int) -> list[tuple[str, str, str]]:
    """(file, line, function) of the training thread, innermost first."""
    return next((_FRAME.findall(block) for block in stacks.split("\n\n") if f"{main:#018x}" in block), [])
