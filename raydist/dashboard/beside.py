"""`raydist train --dashboard`: serves the page of a run while it trains, in a process of its own.

Runs in: the driver (`beside`), and that process (`main`), which must not import torch or ray. It has the lowest priority, and is
the first that the kernel ends if memory is short; whatever happens to it, the run goes on. The driver opens the socket, so the
address is known at once. The process ends with the driver, also if that is killed: its stdin is a pipe that only the driver can
write to.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from urllib.parse import quote

from raydist.dashboard.access import AccessPolicy
from raydist.run.directory import LOGS, RunDir
from raydist.storage import opener

HOST, PORT = "127.0.0.1", 8275
LOG = f"{LOGS}/dashboard.log"
_END_S = 10.0
_START = "import sys; sys.path.insert(0, sys.argv[1]); from raydist.dashboard.beside import main; main()"


@contextmanager
def beside(run: RunDir, note: Callable[[str], None]) -> Iterator[None]:
    """Meanwhile a process serves the pages of the run's storage to this host. `note` gets the address of the run's page with its
    token; or why there is none, which is no error."""
    try:
        process = _start(run, note)
    except OSError as error:
        note(f"raydist: no dashboard: {error.strerror or error}; training continues without it")
        yield
        return
    try:
        yield
    finally:
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    """Serves what the first line of stdin says until its end."""
    from raydist.dashboard.announced import announced
    from raydist.dashboard.server import serve
    from raydist.storage import Storage

    asked = json.loads(sys.stdin.buffer.readline())
    homes, access = [Storage(asked["storage"])], AccessPolicy(HOST, asked["port"], asked["token"])
    with socket.socket(fileno=asked["socket"]) as listening, announced(homes, access.address):
        asyncio.run(serve(homes, listening, access, lambda: None, until=sys.stdin.fileno()))


def _start(run: RunDir, note: Callable[[str], None]) -> subprocess.Popen[bytes]:
    """The process. Raises OSError."""
    with _listener() as listening, _log(run) as log:
        access = AccessPolicy(HOST, listening.getsockname()[1], secrets.token_urlsafe(32))
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, str(Path(__file__).parents[2])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=log,
            pass_fds=[listening.fileno()],
            start_new_session=True,  # Ctrl-C is for the run, which is shown until it has ended
        )
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, 19)
            Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
        assert process.stdin is not None
        asked = {"storage": run.home.full_uri, "socket": listening.fileno(), "port": access.port, "token": access.token}
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(asked).encode() + b"\n")
            process.stdin.flush()
    page = f"/run/0/{quote(run.name, safe='')}"
    note(f"raydist: its live page, for anyone with this URL: {access.url(page)}")
    return process


def _listener() -> socket.socket:
    """At the dashboard's usual port, or any free one. Raises OSError."""
    try:
        return socket.create_server((HOST, PORT))
    except OSError:
        return socket.create_server((HOST, 0))


def _log(run: RunDir) -> IO[bytes]:
    """For its errors: RUN/logs/dashboard.log, or nowhere if the run is on an object store, whose files cannot grow."""
    if run.storage.local is None:
        return open(os.devnull, "ab")
    return open(run.storage.appendable(LOG), "ab", opener=opener)
