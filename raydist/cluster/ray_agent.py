"""Stands in for an agent of a private Ray's raylet until something connects to the agent's port; then becomes the agent.

Runs in: a process that the raylet starts, as `python -I -S ray_agent.py HOST PORT COMMAND...`, in place of COMMAND. Imports nothing
else: it takes 0.03 s of CPU time, Ray's two agents take 1.7 s and 150 MB. The raylet ends if one of its agents ends, so that they
cannot be left out.

The raylet asks the runtime-env agent only for a task or an actor with a runtime environment, and asks again until it gets an
answer. Only this user's connections count. What listens on that port gets Ray's token, and decides what workers execute: the driver
holds the port for this user, before, between and after (raydist/launch/rendezvous.py), and the agent shares it with the driver.
PORT 0: nothing ever connects; a private Ray without metrics has no use for the dashboard's agent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_AGENT = "--agent"


def main(host: str, port: int, command: list[str]) -> None:
    """Returns never. `command`: of the agent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(os.environ["RAY_RAYLET_PID"]):  # the raylet has ended meanwhile
        return
    if port:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family, reuse_port=True) as server:
            while not _ours(server.accept()[0]):
                pass
        script = next(number for number, text in enumerate(command) if text.endswith(".py"))
        os.execv(command[0], [*command[:script], __file__, _AGENT, str(port), *command[script:]])
    while True:
        signal.pause()


def _become(port: int, arguments: list[str]) -> None:
    """The agent, as Python runs its script, which asks for its port without SO_REUSEPORT. `arguments`: the script, and its own."""
    import runpy

    class Socket(socket.socket):
        def bind(self, address: object) -> None:
            if isinstance(address, tuple) and address[1] == port:
                self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            super().bind(address)  # type: ignore[arg-type]

    socket.socket = Socket  # type: ignore[misc]
    sys.argv, sys.path[0] = arguments, os.path.dirname(arguments[0])
    runpy.run_path(arguments[0], run_name="__main__")


def _ours(connection: socket.socket) -> bool:
    """Closes the connection; whether its other end is a socket of this user on this host, by proc(5)'s table of sockets."""
    with connection:
        try:
            ends = _in_table(connection.getpeername()), _in_table(connection.getsockname())
        except OSError:  # it has been closed already
            return False
        with open("/proc/net/tcp6" if connection.family == socket.AF_INET6 else "/proc/net/tcp") as table:
            rows = [line.split() for line in table]
        return any((row[1], row[2]) == ends and int(row[7]) == os.getuid() for row in rows[1:])


def _in_table(address: tuple[str, int]) -> str:
    """An address as that table has it: each four bytes as one number of the machine."""
    host, port = address[:2]
    raw = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    words = (raw[i : i + 4] for i in range(0, len(raw), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words) + f":{port:04X}"


if __name__ == "__main__":
    if sys.argv[1] == _AGENT:
        _become(int(sys.argv[2]), sys.argv[3:])
    else:
        main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
