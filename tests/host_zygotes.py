"""Processes of hosts (tests/hosts.py) that are forked from one that has imported Ray or torch, instead of importing it themselves.

A host's Ray workers are forked from a process in that host, as those of a private Ray are (raydist/cluster/ray_worker.py), and so
are the fork servers of its ranks (raydist/launch/zygote.py), `ray start` and the runtime-env agent of its raylet. These processes,
the zygotes, are themselves forked from a template outside of the hosts, of which the test process starts one for each kind: it
imports once for all hosts.

    template --fork--> enters the namespaces of host 0 --fork--> zygote --fork--> worker, or fork server
                   +-> enters the namespaces of host 1 --fork--> zygote

The imports of Ray take a worker 1.5 s of processor time, those of torch a fork server 3 to 4 s; a run on three hosts that loses one
has 30 and 15 of these processes. As a script: in place of Ray's setup_worker.py, or of a file that COMMAND or AGENT comes before.
Imports torch and Ray in templates only.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

REPOSITORY = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path[0] = str(REPOSITORY)  # the modules beside this file must not be found by their names alone

from raydist.launch import zygote  # noqa: E402 - needs the path above where this is a script

COMMAND, AGENT, AGENT_FILE = "--command", "--agent", "--agent-file"
"""First argument of the script: the others are a Python file and its arguments, which run in a process that the host's zygote of
Ray workers forks. AGENT: of a raylet, and AGENT_FILE in that process."""
_CONTEXT = "--serialized-runtime-env-context="
_NAMESPACES = {
    "user": 0x10000000,
    "net": 0x40000000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "mnt": 0x00020000,
    "pid": 0x20000000,
}
"""Flags of setns(2). Names are those of /proc/PID/ns."""


class Template:
    """Starts when it is constructed, in the environment `env`; ends with this process, or by `close`.

    `serve` and `preload`: see raydist.launch.zygote.Zygote. `name`: the variable by which processes find the zygote of their host.
    """

    def __init__(self, serve: str, preload: Sequence[str], name: str, env: dict[str, str]) -> None:
        self._address = f"\0raydist-test-{name}"  # an abstract socket, of the host's own network
        code = f"from {__name__} import main; main({serve!r}, {list(preload)!r}, {self._address!r})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=REPOSITORY, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self.pid = self._process.pid
        self._asking = threading.Lock()
        self.variables = zygote.variables(self._address, {}, preload, name)
        """What processes of a host need in their environment to find its zygote."""

    def fork(self, init: int, own_users: bool) -> int:
        """Forks a zygote in the namespaces of the process `init`, which it ends with; returns its pid, as on this machine.
        `own_users`: whether that process has a user namespace of its own."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._asking:  # hosts join in threads
            self._process.stdin.write(json.dumps([init, own_users]) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline().strip()
        assert line.isdecimal(), line or "the template of the hosts' zygotes has ended"
        return int(line)

    def close(self) -> None:
        """Ends the template; zygotes end with their hosts."""
        self._process.kill()
        self._process.communicate()


def main(serve: str, preload: Sequence[str], address: str) -> None:
    """The template: forks a zygote for each line on stdin, and prints its pid, once it listens; or why there is none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    failure = zygote.load(preload)
    if failure:
        sys.exit(failure)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children need no waitpid
    for line in sys.stdin:
        init, own_users = json.loads(line)
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.close(reading)
            with open(os.devnull) as nothing:  # what is forked from it must not read the template's lines
                os.dup2(nothing.fileno(), 0)
            try:
                enter(init, own_users)
                _become_parent(writing, serve, preload, address)
            except OSError as error:
                os.write(writing, f"{type(error).__name__}: {error}".replace("\n", " ").encode())
                os._exit(1)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            print(pipe.read(), flush=True)


def enter(init: int, own_users: bool) -> None:
    """Enters the namespaces of that process; the next child is in its process namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = [name for name in _NAMESPACES if own_users or name != "user"]
    found = [(name, os.open(f"/proc/{init}/ns/{name}", os.O_RDONLY)) for name in names]
    for name, descriptor in found:
        if libc.setns(descriptor, _NAMESPACES[name]):
            raise OSError(ctypes.get_errno(), f"setns: {name}")
        os.close(descriptor)
    os.chdir(REPOSITORY)  # of the host's own mounts


def _become_parent(told: int, serve: str, preload: Sequence[str], address: str) -> NoReturn:
    """Forks the zygote, which is the first process in the host's process namespace, and waits for it; `told`: gets its pid."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(1024)
        pid = os.fork()
        if pid == 0:
            os.close(told)
            os.setsid()
            kept, owner = socket.socketpair()
            zygote.main(listener.detach(), owner.detach(), serve, preload)
            kept.close()
            os._exit(0)
    os.write(told, str(pid).encode())
    os.close(told)
    os.waitpid(pid, 0)
    os._exit(0)


def _prepare(context: dict[str, object]) -> bool:
    """Makes this process what a runtime environment says; False if Ray has to, also for a folder with a raydist of its own."""
    match context.get("command_prefix") or []:
        case []:
            folder = None
        case ["cd", str(quoted), "&&"]:
            (folder,) = shlex.split(quoted)
            if os.path.exists(os.path.join(folder, "raydist")):
                return False
        case _:
            return False
    if context.get("override_worker_entrypoint") or context.get("py_executable", sys.executable) != sys.executable:
        return False
    variables = context.get("env_vars") or {}
    assert isinstance(variables, dict)
    os.environ.update({name: os.path.expandvars(value) for name, value in variables.items()})
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [each for each in path if each and each not in sys.path]
    if folder is not None:
        os.chdir(folder)
    return True


def _worker() -> None:
    """The script: as ray_worker.py, also for a worker with a runtime environment of variables and a folder."""
    from raydist.cluster import ray_worker

    for number, text in enumerate(sys.argv):
        if text.startswith(_CONTEXT) and _prepare(json.loads(text.removeprefix(_CONTEXT))):
            sys.argv[number] = _CONTEXT + "{}"
    ray_worker.main()


def _forked(file: Sequence[str]) -> None:
    """Waits until the process with that file and arguments has exited. Its exit code is not known here."""
    from raydist.cluster import ray_worker

    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            forked = zygote.fork(theirs, os.environ, ray_worker.PRELOAD, ray_worker.VARIABLE)
        assert forked is not None, "the host has no zygote of Ray workers"
        ours.sendall(json.dumps(file).encode())
        ours.shutdown(socket.SHUT_WR)
        forked.wait()


def _agent(started: str, file: Sequence[str]) -> None:
    """Runs an agent's file. An agent ends when its raylet closes a pipe: stdin of the process `started`."""
    os.dup2(os.open(f"/proc/{started}/fd/0", os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0)
    sys.argv = [*file]
    runpy.run_path(file[0], run_name="__main__")


if __name__ == "__main__":
    match sys.argv[1:]:
        case [kind, *file] if kind == COMMAND:
            _forked(file)
        case [kind, *file] if kind == AGENT:
            _forked([__file__, AGENT_FILE, str(os.getpid()), *file])
        case [kind, started, *file] if kind == AGENT_FILE:
            _agent(started, file)
        case _:
            _worker()
