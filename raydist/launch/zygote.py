"""One process on a private Ray's host that imports torch while Ray starts: the fork servers of all its agents are forked from it.

`Zygote` runs in: the driver. `main` in: a process below it, which holds no CUDA context, no threads and no Ray. `fork` in:
each agent. Never imports ray; torch in `main` only.

    driver --Popen--> zygote --fork--> fork server of agent 0 --fork--> rank 0
                              --fork--> fork server of agent 1 --fork--> rank 1

So torch is imported once a host and not once a rank, and before any worker is there (docs/adr/0003). The zygote ends with the
driver, a fork server with its agent, as one that the agent has started itself.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

VARIABLE = "RAYDIST_NURSERY"
"""Tells workers where it is, which variables it was started with, and what it imports: {"path", "env", "preload"}."""
_MESSAGE = 1 << 17
_BACKLOG = 1024


class Zygote:
    """Started as soon as it is made. `folder`: where its socket is to be; `env`: what Ray's workers will have beside os.environ,
    and `defaults` what the zygote has where neither says otherwise.

    `serve`: "module:attribute" of what a forked server runs, as `serve(fd, failure)`; `preload`: the modules that it has imported.
    """

    def __init__(
        self, folder: Path, env: Mapping[str, str], defaults: Mapping[str, str], serve: str, preload: Sequence[str]
    ) -> None:
        path = folder / "zygote"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours, theirs = socket.socketpair()
        with listener, theirs:
            listener.bind(str(path))
            listener.listen(_BACKLOG)
            fds = [listener.fileno(), theirs.fileno()]
            code = f"from {__name__} import main; main(*{fds!r}, {serve!r}, {list(preload)!r})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                env={**defaults, **os.environ, **env, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # no Ctrl-C before it can ignore one
            )
        self.variables = {VARIABLE: json.dumps({"path": str(path), "env": dict(env), "preload": list(preload)})}

    def close(self) -> None:
        """Ends it at once, in the midst of its imports too. What was forked goes on, until its agent ends."""
        self._process.kill()
        self._process.wait()
        self._ours.close()


class Forked:
    """A server that was asked for, and is on its way."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def wait(self) -> None:
        """Returns once it has ended, or if it never came to be. Again, at once."""
        if self._connection.fileno() == -1:
            return
        with self._connection:
            _, fds, _, _ = socket.recv_fds(self._connection, 1, 1)
            for pidfd in fds:
                select.select([pidfd], [], [])
                os.close(pidfd)


def fork(end: socket.socket, env: Mapping[str, str], preload: Sequence[str]) -> Forked | None:
    """Asks the zygote for a server that has the end of this socket, and `env` in place of the zygote's. Returns at once.

    None if there is no zygote for `preload`, or if it was started with other variables than this process, which libraries may
    have read.
    """
    try:
        known = json.loads(os.environ[VARIABLE])
    except KeyError:
        return None
    if list(preload) != known["preload"] or any(os.environ.get(n) != value for n, value in known["env"].items()):
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    order = {"env": dict(env), "cwd": os.getcwd(), "path": sys.path}
    try:
        connection.connect(known["path"])
        socket.send_fds(connection, [json.dumps(order).encode()], [end.fileno(), 1, 2])
    except OSError:  # it was killed, or the order is too large
        connection.close()
        return None
    return Forked(connection)


def load(preload: Sequence[str]) -> str:
    """Imports all that ranks would import, for them to share. What went wrong, or ""."""
    import gc

    try:
        for name in preload:
            importlib.import_module(name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    gc.collect()
    gc.freeze()  # so that a child's collector does not write to the pages that it shares
    return ""


def main(listener_fd: int, owner_fd: int, serve: str, preload: Sequence[str]) -> None:
    """The zygote. Returns when the driver's end of the socket is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for those that are forked: Ctrl-C is the driver's business
    module, _, name = serve.partition(":")
    server: Callable[[int, str], None] = getattr(importlib.import_module(module), name)
    failure = load(preload)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children but by their pidfds
    with socket.socket(fileno=listener_fd) as listener, socket.socket(fileno=owner_fd) as owner:
        while owner not in (ready := select.select([listener, owner], [], [])[0]):
            for _ in ready:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):  # who asked is gone
                    if _uid(connection) == os.getuid():
                        _answer(connection, [listener, owner], lambda fd: server(fd, failure))


def _uid(connection: socket.socket) -> int:
    """The user who asks. A server runs what it is told."""
    size = struct.calcsize("3i")
    return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1])


def _answer(connection: socket.socket, shared: Sequence[socket.socket], serve: Callable[[int], None]) -> None:
    message, fds, _, _ = socket.recv_fds(connection, _MESSAGE, 3)
    if len(fds) < 3:
        return
    pid = os.fork()
    if pid == 0:
        for inherited in (connection, *shared):
            inherited.close()
        _become_server(json.loads(message), fds, serve)
    for fd in fds:
        os.close(fd)
    pidfd = os.pidfd_open(pid)
    socket.send_fds(connection, [b"."], [pidfd])
    os.close(pidfd)


def _become_server(order: Mapping[str, object], fds: Sequence[int], serve: Callable[[int], None]) -> None:
    """In the child, which is as if the agent had started it: never returns."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end, *streams = fds
        for number, fd in enumerate(streams, start=1):
            os.dup2(fd, number)
            os.close(fd)
        os.environ.clear()
        os.environ.update(order["env"])  # type: ignore[call-overload]
        os.chdir(str(order["cwd"]))
        sys.path[:] = order["path"]  # type: ignore[call-overload]
        importlib.invalidate_caches()
        serve(end)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        leave(status)


def leave(status: int) -> NoReturn:
    """Ends a forked process without the interpreter's end, where native threads of a sound run may still abort."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
