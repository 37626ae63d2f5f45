"""Programs of the tests that use Ray, forked from a process that has imported what they import, instead of importing it themselves.

    test --Popen--> this file as a script --asks--> template --fork--> watcher --fork--> program

A program is the `raydist` command, or a module. The script imports almost nothing. It passes arguments, environment, streams and
signals on, and exits as the program does; the program is killed if the script is. It runs in the script's namespaces, so this works
on the hosts of tests/hosts.py too.

The imports of a driver take 2 s of processor time. If it starts a private Ray, the processes from which Ray's workers and the ranks
are forked (raydist/cluster/ray_worker.py, raydist/launch/fork_server.py) take another 6: they are forked as well. All else is as in
a user's shell. Some tests start their programs without this file: tests/end_to_end/test_package.py, tests/cluster/test_session.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import psutil

REPOSITORY = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path[0:0] = [str(REPOSITORY)]

from raydist.launch import zygote  # noqa: E402 - needs the path above where this is a script

PROGRAMS, RANKS = "RAYDIST_TEST_PROGRAMS", "RAYDIST_TEST_RANKS"
"""The variables by which programs find the templates: of programs and of Ray's workers, with Ray; of fork servers, with torch."""
TELL = "RAYDIST_TEST_TELL"
"""The descriptor to which the script writes the program's pid, as on this machine."""
PRELOAD = (
    "raydist.cluster.ray_preload",
    "raydist.cli.main",
    "raydist.cluster.local_ray",
    "raydist.cluster.run.supervisor",
    "tests.host_zygotes",
)
_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_MESSAGE = 1 << 17
_PATH = list(sys.path)


# --- in the test process

_TEMPLATES: list[zygote.Zygote] = []
_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def environment() -> dict[str, str]:
    """The variables that a program needs; starts the templates at its first call."""
    if not _TEMPLATES:
        from raydist.cluster import ray_worker
        from raydist.cluster.session import _PRIVATE_RAY
        from raydist.launch import fork_server

        # Not in TMPDIR: on a host of the tests that is another folder.
        folder = tempfile.TemporaryDirectory(prefix="rd-forked-", dir="/tmp")
        _FOLDERS.append(folder)
        serve = f"{__name__}:serve"
        # Ray reads these when it is imported: its settings, and what ray_worker.start_zygote sets, which a driver does not use.
        settings = {
            **ray_worker.DEFAULTS,
            **_PRIVATE_RAY,
            "RAY_JOB_ID": ray_worker.NO_JOB,
            "RAY_RAYLET_PID": str(os.getpid()),
        }
        _TEMPLATES.append(zygote.Zygote(f"{folder.name}/programs", {}, settings, serve, PRELOAD, PROGRAMS))
        ranks = fork_server.PRELOAD, RANKS
        _TEMPLATES.append(zygote.Zygote(f"{folder.name}/ranks", {}, fork_server.VARIABLES, serve, *ranks))
    return _TEMPLATES[0].variables | _TEMPLATES[1].variables


def command(*program: str) -> list[str]:
    """The command line of a forked program: "raydist" or the name of a module, and its arguments. Needs `environment`."""
    return [sys.executable, "-I", "-S", __file__, *program]


def shell(folder: Path, path: str) -> dict[str, str]:
    """The variables of a shell whose `raydist` is forked, and `python -m raydist`, unless a raydist is in the working directory.
    Creates `folder`, which comes before `path`."""
    folder.mkdir()
    raydist = f'exec {subprocess.list2cmdline(command("raydist"))} "$@"'
    python = (
        f'if [ "$1 $2" = "-m raydist" ] && [ ! -e raydist ]; then shift 2; {raydist}; fi\nexec {sys.executable} "$@"'
    )
    for name, script in (("raydist", raydist), ("python", python)):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return {**environment(), "PATH": f"{folder}:{path}"}


class Program(subprocess.Popen[str]):
    """A forked program; `command` and `environment` are added to what it is given. `pid` is the script's, `inner` the program's."""

    def __init__(self, program: Sequence[str], env: Mapping[str, str], **options: Any) -> None:
        reading, writing = os.pipe()
        with open(reading) as told:
            with open(writing, "w"):
                whole = {**env, **environment(), TELL: str(writing)}
                super().__init__(command(*program), env=whole, pass_fds=[writing], text=True, **options)
            self.inner = int(told.read() or 0)  # 0: it has not been started, and the script says why

    def processes(self) -> list[psutil.Process]:
        """Those that run now: the program, its watcher, its zygotes, and all below them; not the script."""
        import psutil  # not in the script: it has no installed packages

        found: dict[int, psutil.Process] = {}
        zygotes = Path(_FOLDERS[0].name, str(self.inner))
        for pid in (self.inner, *map(int, zygotes.read_text().split() if zygotes.exists() else ())):
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(pid)
                above = [root.parent()] if pid == self.inner else []
                found |= {p.pid: p for p in (*above, root, *root.children(recursive=True)) if p is not None}
        return list(found.values())


def run(program: Sequence[str], env: Mapping[str, str], *, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs it to its end."""
    with Program(program, env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            out, err = process.communicate(timeout=400)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(program, process.returncode, out, err)


def pids() -> set[int]:
    """The templates' processes."""
    return {each.pid for each in _TEMPLATES}


def close() -> None:
    """Ends the templates."""
    while _TEMPLATES:
        _TEMPLATES.pop().close()
    while _FOLDERS:
        _FOLDERS.pop().cleanup()


# --- the script


def _run(arguments: Sequence[str]) -> NoReturn:
    """Asks for the program, and exits as it does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = {name: value for name, value in os.environ.items() if name not in (PROGRAMS, RANKS, TELL)}
    with theirs:
        if zygote.fork(theirs, env, PRELOAD, PROGRAMS) is None:
            sys.exit("the template of the tests' programs has ended")
    for number in _SIGNALS:
        signal.signal(number, lambda number, _: ours.send(bytes([number])))
    order = {
        "arguments": list(arguments),
        "cwd": os.getcwd(),
        "ranks": os.environ[RANKS],
    }
    socket.send_fds(ours, [json.dumps(order).encode()], [0])
    while answer := ours.recv(_MESSAGE):
        told = json.loads(answer)
        if "status" in told:
            _exit_as(told["status"])
        if TELL in os.environ:
            os.write(int(os.environ[TELL]), str(told["pid"]).encode())
            os.close(int(os.environ[TELL]))
    sys.exit("the program's watcher has ended")


def _exit_as(status: int) -> NoReturn:
    """Exits with that status of `waitpid`."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


# --- forked from a template


def serve(fd: int, failure: str) -> None:
    """Becomes what the peer orders: a program with its watcher, or a zygote. `failure`: error of the template's imports, or ""."""
    if failure:
        sys.exit(f"the template's imports failed: {failure}")
    with socket.socket(fileno=fd) as asking:
        message, fds, _, _ = socket.recv_fds(asking, _MESSAGE, 2)
        order = json.loads(message)
        if "zygote" in order:
            asking.close()
            _become_zygote(*fds, *order["zygote"])
        else:
            os.dup2(fds[0], 0)
            os.close(fds[0])
            _watch(asking, order)


def _watch(asking: socket.socket, order: Mapping[str, Any]) -> NoReturn:
    """Forks the program in the script's namespaces, passes signals on to it, and reports its end."""
    _enter(struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[0])
    os.chdir(order["cwd"])
    pid = os.fork()
    if pid == 0:
        asking.close()
        _become_program(order)
    pidfd = os.pidfd_open(pid)
    with contextlib.suppress(OSError):
        asking.send(json.dumps({"pid": pid}).encode())
    while pidfd not in select.select([pidfd, asking], [], [])[0]:
        if not (numbers := asking.recv(_MESSAGE)):
            os.kill(pid, signal.SIGKILL)  # the script was killed
            select.select([pidfd], [], [])
            break
        for number in numbers:
            os.kill(pid, number)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        asking.send(json.dumps({"status": status}).encode())
    os._exit(0)


def _enter(script: int) -> None:
    """Enters the namespaces of that process, if it is on one of the tests' hosts."""
    from tests import host_zygotes

    def own(name: str) -> bool:
        return os.stat(f"/proc/{script}/ns/{name}").st_ino != os.stat(f"/proc/self/ns/{name}").st_ino

    if own("net"):
        host_zygotes.enter(script, own("user"))


def _become_program(order: Mapping[str, Any]) -> NoReturn:
    import atexit
    import random
    import runpy
    import threading
    import traceback

    import numpy

    from raydist.cluster import authentication

    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the template ignores it
    random.seed()
    numpy.random.seed()
    tempfile.tempdir = None  # TMPDIR may be another
    authentication.reread()  # read at Ray's import, as all of its settings
    _fork_zygotes(order)
    name, *arguments = order["arguments"]
    raydist = str(Path(sys.executable).with_name("raydist"))
    code: object = 0
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if name == "raydist":
        sys.argv = [raydist, *arguments]
        first = os.path.dirname(raydist)
    else:
        sys.argv = ["-m", *arguments]
        first = os.getcwd()
    sys.path[:] = [first, *filter(None, path), *(each for each in _PATH[1:] if each not in path)]
    _set_title([sys.executable, *([raydist] if name == "raydist" else ["-m", name]), *arguments])
    try:
        if name == "raydist":
            from raydist.cli.main import main

            main()
        else:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    zygote.leave(code if isinstance(code, int) else int(code is not None))


def _set_title(words: Sequence[str]) -> None:
    """Of the process, in place of the template's command line."""
    from ray._raylet import setproctitle

    setproctitle(" ".join(words))


def _fork_zygotes(order: Mapping[str, Any]) -> None:
    """From now on this process's zygotes are forked. That of Ray's workers is a child of this process, as in a user's shell: faults
    find Ray's processes that way (raydist/worker/faults/run_processes.py). It is forked now, before there are threads."""
    from raydist.cluster import ray_worker

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        message, fds, _, _ = socket.recv_fds(theirs, _MESSAGE, 4)
        if message:
            told = json.loads(message)
            for number, fd in enumerate(fds[2:], start=1):
                os.dup2(fd, number)
                os.close(fd)
            os.environ.clear()
            os.environ.update(told["env"])
            os.chdir(told["cwd"])
            theirs.close()
            _become_zygote(*fds[:2], *told["zygote"])
        os._exit(0)
    theirs.close()
    waiting = [(pid, ours)]

    def made(address: str, env: Mapping[str, str], defaults: Mapping[str, str], *what: Any) -> _Forked:
        if what[-1] == ray_worker.VARIABLE:
            return _Forked(waiting.pop(), order, address, env, defaults, *what)
        return _Forked(None, order, address, env, defaults, *what)

    zygote.Zygote = ray_worker.Zygote = made  # type: ignore[assignment, misc]


class _Forked:
    """As raydist.launch.zygote.Zygote. `waiting`: the process that becomes it, and the socket on which it waits; None: it is forked
    from the template of fork servers."""

    def __init__(
        self,
        waiting: tuple[int, socket.socket] | None,
        about: Mapping[str, Any],
        address: str,
        env: Mapping[str, str],
        defaults: Mapping[str, str],
        serve: str,
        preload: Sequence[str],
        name: str = zygote.VARIABLE,
    ) -> None:
        whole = {**defaults, **os.environ, **env, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        order = json.dumps({"zygote": [serve, list(preload)], "env": whole, "cwd": os.getcwd()}).encode()
        self._ours, owned = socket.socketpair()
        with owned, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen(1024)
            fds = [listener.fileno(), owned.fileno()]
            if waiting is not None:
                self.pid, asking = waiting
                with asking:
                    socket.send_fds(asking, [order], [*fds, 1, 2])
                self._pidfd = os.pidfd_open(self.pid)
            else:
                self._ask(about["ranks"], whole, order, fds)
        self._child = waiting is not None
        self.variables = zygote.variables(address, env, preload, name)

    def _ask(self, known: str, env: Mapping[str, str], order: bytes, fds: Sequence[int]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        template = json.loads(known)
        os.environ[RANKS] = known
        with ours, theirs:
            forked = zygote.fork(theirs, env, template["preload"], RANKS)
            assert forked is not None, "the template has ended"
            socket.send_fds(ours, [order], list(fds))
        del os.environ[RANKS]
        with forked._connection as connection:
            _, (self._pidfd,), _, _ = socket.recv_fds(connection, 1, 1)
        facts = Path(f"/proc/self/fdinfo/{self._pidfd}").read_text()
        self.pid = next(int(line.split()[1]) for line in facts.splitlines() if line.startswith("Pid:"))
        with open(f"{os.path.dirname(template['path'])}/{os.getpid()}", "a") as mine:
            mine.write(f"{self.pid}\n")

    def close(self) -> None:
        """As the other's."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        select.select([self._pidfd], [], [])
        os.close(self._pidfd)
        if self._child:
            os.waitpid(self.pid, 0)
        self._ours.close()


def _become_zygote(listener: int, owner: int, serve: str, preload: Sequence[str]) -> None:
    os.setsid()
    sys.path[:] = ["", *filter(None, os.environ["PYTHONPATH"].split(os.pathsep))]
    if "ray" in sys.modules:
        _set_title([sys.executable, "-c", f"from {zygote.__name__} import main; main({serve!r}, {list(preload)!r})"])
    zygote.main(listener, owner, serve, preload)


if __name__ == "__main__":
    _run(sys.argv[1:])
