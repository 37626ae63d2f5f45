"""Starts ranks in milliseconds: a server process that has torch and the loop imported forks one process per attempt.

`ForkServer` runs in: each Ray Train worker (the rank's agent). `serve` runs in: a process of its own without CUDA context,
threads or Ray, so that it can be forked safely. Never imports ray; torch in the server only.

    agent --Popen--> fork server --fork--> rank of attempt 1        (exited, killed: the agent gets the status)
                                 --fork--> rank of attempt 2 ...

When a process exits, its children are terminated: the server exits when the agent's end of its socket is closed, and the ranks are
killed when the server exits (PR_SET_PDEATHSIG), even if stopped. If there is a zygote (zygote.py), the server is forked from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from raydist.ipc import AGENT_PID, mailbox
from raydist.launch import zygote

MESSAGE = 1 << 16
_FDS = 8
"""Maximum number of descriptors passed to a rank."""
PRELOAD = ("raydist.launch.rank_main", "raydist.worker.loop", "torch.distributed.fsdp", "torch._dynamo")
"""Modules that a rank would import anyway; DDP's constructor imports the last one."""
VARIABLES = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # tensors in huge pages: a step on the CPU takes 2 to 3% less time
    # CUDA may not be initialised before a fork. With NVML, torch detects GPUs without initialising it.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""The server's environment variables, in addition to its agent's; the agent's values take precedence."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def start_zygote(folder: Path, env: Mapping[str, str]) -> zygote.Zygote:
    """The zygote for the fork servers of a private Ray's agents. They find it by its `variables` in their environment."""
    return zygote.Zygote(str(folder / "zygote"), env, VARIABLES, f"{__name__}:serve", PRELOAD)


def share_zygote(key: str, env: Mapping[str, str]) -> zygote.Zygote | None:
    """For the agents of one node and group, which have the same `key` and `env`. The first call starts a zygote; the others return
    None. The fork server of this process uses that zygote from now on.
    """
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    address = f"\0raydist-{os.getuid()}-{name}"  # an abstract socket: no file is left behind
    made = None
    with contextlib.suppress(OSError):  # the address is in use
        made = zygote.Zygote(address, env, VARIABLES, f"{__name__}:serve", PRELOAD)
    os.environ.update(zygote.variables(address, env, PRELOAD))
    return made


@dataclass(slots=True)
class Process:
    """A rank's process. `status`: the wait status, once `ended` is set; None if it is unknown because the server exited."""

    pid: int
    ended: threading.Event = field(default_factory=threading.Event)
    status: int | None = None

    @property
    def how(self) -> str:
        """How it exited, as text: "SIGKILL", "exit code 3"."""
        if self.status is None:
            return "its fork server exited"
        if os.WIFSIGNALED(self.status):
            return signal.Signals(os.WTERMSIG(self.status)).name
        return f"exit code {os.WEXITSTATUS(self.status)}"


class ForkServer:
    """Starts the server, which imports `preload` at once; `fork` waits until that is done."""

    def __init__(self, preload: Sequence[str] = PRELOAD) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), AGENT_PID: str(os.getpid())}
        env = {**VARIABLES, **os.environ, **path}
        code = f"from {__name__} import main; main({theirs.fileno()}, {list(preload)!r})"
        with theirs:
            forked = zygote.fork(theirs, env, preload)
            self._server = forked or subprocess.Popen(
                [sys.executable, "-P", "-c", code], env=env, pass_fds=[theirs.fileno()]
            )
        self._socket, self._preload = ours, preload
        self._processes: dict[int, Process] = {}
        self._forked: list[Process] = []
        self._changed = threading.Condition()
        self._gone = False
        self._failure = ""
        self._thread = threading.Thread(target=self._listen, name="raydist-forks", daemon=True)
        self._thread.start()

    def fork(self, fds: Sequence[int], env: Mapping[str, str], box: Path | None = None) -> Process:
        """Forks a rank, whose `rank_main.run` gets copies of `fds`; adds `env` to its environment. Raises ChildProcessError.

        `box`: the mailbox of the rank. The server deletes it when it exits, as the rank may have been killed.
        """
        order = {"env": dict(env), "mailbox": box and str(box)}
        with self._changed:
            before = len(self._forked)
            with contextlib.suppress(OSError):  # the server exited: reported below
                socket.send_fds(self._socket, [json.dumps(order).encode()], list(fds))
            self._changed.wait_for(lambda: len(self._forked) > before or self._failure or self._gone)
            if len(self._forked) == before:
                status = None if self._failure else self._server.wait()
                known = f": exit code {status}" if status is not None else ""
                raise ChildProcessError(self._failure or f"the fork server exited{known}")
            return self._forked[-1]

    def living(self) -> ForkServer:
        """This server; if it has exited (it may have been killed), a new one."""
        if not self._gone:
            return self
        self.close()
        return ForkServer(self._preload)

    def kill(self, process: Process) -> None:
        """Sends SIGKILL to a rank, unless it has exited. The server sends it: only the server knows that the pid is not reused."""
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps({"kill": process.pid}).encode())

    def close(self) -> None:
        """Terminates the server and all its ranks."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._server.wait()
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while message := _receive(self._socket):
            report = json.loads(message)
            with self._changed:
                if "failure" in report:
                    self._failure = report["failure"]
                elif "forked" in report:
                    process = self._processes[report["forked"]] = Process(report["forked"])
                    self._forked.append(process)
                else:
                    process = self._processes.pop(report["ended"])
                    process.status = report["status"]
                    process.ended.set()
                self._changed.notify_all()
        with self._changed:
            self._gone = True
            for process in self._processes.values():
                process.ended.set()
            self._changed.notify_all()


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(MESSAGE)
    except OSError:
        return b""


def main(fd: int, preload: Sequence[str]) -> None:
    """The server's entry point, in a process that the agent started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles Ctrl-C
    serve(fd, zygote.load(preload))


def serve(fd: int, failure: str) -> None:
    """Forks ranks for the agent at the other end of the socket, until it is closed. `failure`: error of the imports, or ""."""
    with socket.socket(fileno=fd) as agent:
        if not failure:
            _Server(agent).serve()
            return
        agent.send(json.dumps({"failure": failure}).encode())
        while agent.recv(MESSAGE):  # closing with unread data would discard the message above
            pass


class _Server:
    def __init__(self, agent: socket.socket) -> None:
        self._agent = agent
        self._selector = selectors.PollSelector()  # needs no descriptor, which a child would inherit
        self._selector.register(agent, selectors.EVENT_READ)
        self._pids: dict[int, int] = {}
        """pidfd -> pid of the ranks that are not reaped yet."""
        self._mailboxes: set[Path] = set()

    def serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._agent:
                    self._reap(key.fd)
                    continue
                message, fds, _, _ = socket.recv_fds(self._agent, MESSAGE, _FDS)
                if not message:
                    for pid in self._pids.values():
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(pid, signal.SIGKILL)  # the process group: its children would continue
                    for path in self._mailboxes:
                        mailbox.delete(path)
                    return
                request = json.loads(message)
                if "env" in request:
                    if box := request.get("mailbox"):
                        self._mailboxes.add(Path(box))
                    self._fork(fds, request["env"])
                elif request["kill"] in self._pids.values():
                    os.kill(request["kill"], signal.SIGKILL)

    def _fork(self, fds: list[int], env: Mapping[str, str]) -> None:
        pid = os.fork()
        if pid == 0:
            for inherited in (self._agent.fileno(), *self._pids):
                os.close(inherited)
            _become_rank(fds, env)
        for fd in fds:
            os.close(fd)
        pidfd = os.pidfd_open(pid)
        self._pids[pidfd] = pid
        self._selector.register(pidfd, selectors.EVENT_READ)
        self._tell(forked=pid)

    def _reap(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        pid = self._pids.pop(pidfd)
        os.close(pidfd)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # its children; the pid is not reused before waitpid
        self._tell(ended=pid, status=os.waitpid(pid, 0)[1])

    def _tell(self, **what: int) -> None:
        with contextlib.suppress(OSError):  # the agent exited: the main loop notices
            self._agent.send(json.dumps(what).encode())


def _become_rank(fds: list[int], env: Mapping[str, str]) -> None:
    """Runs in the child; never returns."""
    status = 1
    try:
        server = os.getppid()
        assert ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0
        if os.getppid() != server:  # the server exited in between
            os._exit(status)
        os.setsid()
        os.environ.update(env)
        from raydist.launch.rank_main import run

        status = run(*fds)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        zygote.leave(status)
