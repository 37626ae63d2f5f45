"""One process per node that imports torch: the fork servers of all agents of the node are forked from it.

`Zygote` runs in: the driver of a private Ray, which starts it before any worker; on a cluster, the first agent of each node that
has several. `main` in: a child process of it without CUDA context, threads or Ray. `fork` in: each agent. Never
imports ray; torch in `main` only.

    driver, or agent 0 --Popen--> zygote --fork--> fork server of agent 0 --fork--> rank 0
                                         --fork--> fork server of agent 1 --fork--> rank 1

So torch is imported once per node and not once per rank (docs/adr/0003, 0008). The zygote exits with the process that started it,
and a fork server with its agent, as if the agent had started it itself.
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
from typing import NoReturn

VARIABLE = "RAYDIST_ZYGOTE"
"""Tells workers its socket's path, the variables it was started with, and its imports: {"path", "env", "preload"}."""
_MESSAGE = 1 << 17
_BACKLOG = 1024


class Zygote:
    """Starts when it is constructed. `address`: of its Unix socket, a path or "\\0NAME"; raises OSError if that is in use.
    `env`: the environment of the workers in addition to os.environ, and `defaults` values of variables that are in neither.

    `serve`: "module:attribute" of the function of a forked server, called as `serve(fd, failure)`; `preload`: modules to import.
    """

    def __init__(
        self,
        address: str,
        env: Mapping[str, str],
        defaults: Mapping[str, str],
        serve: str,
        preload: Sequence[str],
        name: str = VARIABLE,
    ) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen(_BACKLOG)
            self._ours, theirs = socket.socketpair()
            with theirs:
                fds = [listener.fileno(), theirs.fileno()]
                code = f"from {__name__} import main; main(*{fds!r}, {serve!r}, {list(preload)!r})"
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", code],
                    env={**defaults, **os.environ, **env, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    pass_fds=fds,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # keeps Ctrl-C away until it can ignore it
                )
        self.pid = self._process.pid
        self.variables = variables(address, env, preload, name)

    def close(self) -> None:
        """Terminates it at once, even during its imports. Forked servers continue until their agent exits."""
        self._process.kill()
        self._process.wait()
        self._ours.close()


def variables(address: str, env: Mapping[str, str], preload: Sequence[str], name: str = VARIABLE) -> dict[str, str]:
    """What an agent needs in its environment to find the zygote with that address, `env` and `preload`."""
    return {name: json.dumps({"path": address, "env": dict(env), "preload": list(preload)})}


class Forked:
    """A server that was requested."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def wait(self) -> None:
        """Returns once the server has exited, or if it was never forked. Further calls return at once."""
        if self._connection.fileno() == -1:
            return
        with self._connection:
            _, fds, _, _ = socket.recv_fds(self._connection, 1, 1)
            for pidfd in fds:
                select.select([pidfd], [], [])
                os.close(pidfd)

    def close(self) -> None:
        """Leaves the server to itself; in place of `wait`."""
        self._connection.close()


def fork(end: socket.socket, env: Mapping[str, str], preload: Sequence[str], name: str = VARIABLE) -> Forked | None:
    """Requests a server from the zygote, with this socket's end, and with `env` in place of the zygote's. Returns at once.

    None if there is no zygote for `preload`, or if the zygote was started with other environment variables than this process,
    because libraries may have read them.
    """
    try:
        known = json.loads(os.environ[name])
    except KeyError:
        return None
    if list(preload) != known["preload"] or any(os.environ.get(n) != value for n, value in known["env"].items()):
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    order = {"env": dict(env), "cwd": os.getcwd(), "path": sys.path}
    try:
        connect(connection, known["path"])
        socket.send_fds(connection, [json.dumps(order).encode()], [end.fileno(), 1, 2])
    except OSError:  # it was killed, another user has its name, or the message is too large
        connection.close()
        return None
    return Forked(connection)


def load(preload: Sequence[str]) -> str:
    """Imports the modules that ranks need, so that they share them. Returns the error, or ""."""
    import gc

    gc.disable()  # an import makes no garbage, and searching for it takes a tenth of the time
    try:
        for name in preload:
            importlib.import_module(name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        gc.enable()
    gc.collect()
    gc.freeze()  # so that the child's garbage collector does not write to shared pages
    return ""


def main(listener_fd: int, owner_fd: int, serve: str, preload: Sequence[str]) -> None:
    """The zygote. Returns when the owner's end of the socket is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by forked processes: the driver handles Ctrl-C
    module, _, name = serve.partition(":")
    server: Callable[[int, str], None] = getattr(importlib.import_module(module), name)
    failure = load(preload)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children need no waitpid: agents use pidfds
    with socket.socket(fileno=listener_fd) as listener, socket.socket(fileno=owner_fd) as owner:
        while owner not in (ready := select.select([listener, owner], [], [])[0]):
            for _ in ready:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):  # the requester has exited
                    if peer_uid(connection) == os.getuid():
                        _answer(connection, [listener, owner], lambda fd: server(fd, failure))


def connect(connection: socket.socket, address: str) -> None:
    """Connects to a process of this user. Raises OSError if there is none.

    Never waits: another user may have taken an abstract name, and accept no connection.
    """
    connection.setblocking(False)
    connection.connect(address)
    connection.setblocking(True)
    if peer_uid(connection) != os.getuid():
        raise PermissionError(f"{address!r} is another user's")


def peer_uid(connection: socket.socket) -> int:
    """The uid of the peer. Checked, because a server executes what it receives, and an order contains the agent's environment."""
    size = struct.calcsize("3i")
    return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1])


def _answer(connection: socket.socket, shared: Sequence[socket.socket], serve: Callable[[int], None]) -> None:
    message, fds, _, _ = socket.recv_fds(connection, _MESSAGE, 3)
    try:
        if len(fds) < 3:
            return
        pid = os.fork()
        if pid == 0:
            for inherited in (connection, *shared):
                inherited.close()
            _become_server(json.loads(message), fds, serve)
        fds.append(os.pidfd_open(pid))
        socket.send_fds(
            connection, [b"."], fds[-1:]
        )  # an error if the requester has exited, or does not wait for the server
    finally:
        for fd in fds:
            os.close(fd)


def _become_server(order: Mapping[str, object], fds: Sequence[int], serve: Callable[[int], None]) -> None:
    """Runs in the child, and sets it up as if the agent had started it; never returns."""
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
    """Exits a forked process without interpreter shutdown, in which native threads may abort even after a successful run."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
