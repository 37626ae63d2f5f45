"""Ranks as processes that start in milliseconds: a server that has torch and the loop imported forks one for each attempt.

`ForkServer` runs in: each Ray Train worker (the rank's agent). `serve` runs in: a process of its own, which holds no
CUDA context, no threads and no Ray, so that a fork of it is a sound process. Never imports ray; torch in the server only.

    agent --Popen--> fork server --fork--> rank of attempt 1        (killed, crashed: the agent hears how)
                                 --fork--> rank of attempt 2 ...

Whichever ends takes those below it along: the server ends with the agent's end of its socket, the ranks with the server
(PR_SET_PDEATHSIG), a stopped one too. Where there is a zygote (zygote.py), the server is forked from that.
"""

from __future__ import annotations

import contextlib
import ctypes
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

from raydist.ipc import AGENT_PID
from raydist.launch import zygote

MESSAGE = 1 << 16
_FDS = 8
"""The most that a rank is given."""
PRELOAD = ("raydist.launch.rank_main", "raydist.worker.loop", "torch.distributed.fsdp", "torch._dynamo")
"""What a rank would import anyway, the last one in DDP's constructor."""
VARIABLES = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # tensors in huge pages: a step on the CPU takes 2 to 3% less
    # CUDA may not be initialised before a fork. NVML tells torch whether there is a GPU without doing so.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""What a server has beside its agent's environment; the agent's own words win."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def start_zygote(folder: Path, env: Mapping[str, str]) -> zygote.Zygote:
    """See `Zygote`: for the fork servers of a private Ray's agents, who find it by its `variables` in their environment."""
    return zygote.Zygote(folder, env, VARIABLES, f"{__name__}:serve", PRELOAD)


@dataclass(slots=True)
class Process:
    """A rank's process. `status` is what waitpid said, once `ended` is set; None if nobody will ever know."""

    pid: int
    ended: threading.Event = field(default_factory=threading.Event)
    status: int | None = None

    @property
    def how(self) -> str:
        """How it ended, in words: "SIGKILL", "exit code 3"."""
        if self.status is None:
            return "its fork server is gone"
        if os.WIFSIGNALED(self.status):
            return signal.Signals(os.WTERMSIG(self.status)).name
        return f"exit code {os.WEXITSTATUS(self.status)}"


class ForkServer:
    """Starts the server, which imports `preload` at once; `fork` waits for that, if it must."""

    def __init__(self, preload: Sequence[str] = PRELOAD) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), AGENT_PID: str(os.getpid())}
        env = {**VARIABLES, **os.environ, **path}
        code = f"from {__name__} import main; main({theirs.fileno()}, {list(preload)!r})"
        with theirs:
            forked = zygote.fork(theirs, env, preload)
            self._server = forked or subprocess.Popen([sys.executable, "-c", code], env=env, pass_fds=[theirs.fileno()])
        self._socket = ours
        self._processes: dict[int, Process] = {}
        self._forked: list[Process] = []
        self._changed = threading.Condition()
        self._gone = False
        self._failure = ""
        self._thread = threading.Thread(target=self._listen, name="raydist-forks", daemon=True)
        self._thread.start()

    def fork(self, fds: Sequence[int], env: Mapping[str, str]) -> Process:
        """A rank, whose `child.run` gets copies of `fds`, with `env` besides the server's environment. Raises ChildProcessError."""
        with self._changed:
            before = len(self._forked)
            with contextlib.suppress(OSError):  # it is gone: told below
                socket.send_fds(self._socket, [json.dumps({"env": dict(env)}).encode()], list(fds))
            self._changed.wait_for(lambda: len(self._forked) > before or self._failure or self._gone)
            if len(self._forked) == before:
                status = None if self._failure else self._server.wait()
                known = f": exit code {status}" if status is not None else ""
                raise ChildProcessError(self._failure or f"the fork server is gone{known}")
            return self._forked[-1]

    def kill(self, process: Process) -> None:
        """SIGKILL to a rank; nothing, if it has ended. The server does it, who knows whether the pid is still its own."""
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps({"kill": process.pid}).encode())

    def close(self) -> None:
        """Ends the server and all its ranks."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._server.wait()
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while message := _receive(self._socket):
            told = json.loads(message)
            with self._changed:
                if "failure" in told:
                    self._failure = told["failure"]
                elif "forked" in told:
                    process = self._processes[told["forked"]] = Process(told["forked"])
                    self._forked.append(process)
                else:
                    process = self._processes.pop(told["ended"])
                    process.status = told["status"]
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
    """The server, in a process that the agent has started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's business
    serve(fd, zygote.load(preload))


def serve(fd: int, failure: str) -> None:
    """Forks ranks for the agent that has the other end of that socket; returns when it is closed. `failure`: of the imports."""
    with socket.socket(fileno=fd) as agent:
        if not failure:
            _Server(agent).serve()
            return
        agent.send(json.dumps({"failure": failure}).encode())
        while agent.recv(MESSAGE):  # what is not read when the socket is closed would cost the agent the message
            pass


class _Server:
    def __init__(self, agent: socket.socket) -> None:
        self._agent = agent
        self._selector = selectors.PollSelector()  # no descriptor of its own, which a child would share
        self._selector.register(agent, selectors.EVENT_READ)
        self._pids: dict[int, int] = {}
        """pidfd -> pid, of those that nobody has waited for."""

    def serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._agent:
                    self._bury(key.fd)
                    continue
                message, fds, _, _ = socket.recv_fds(self._agent, MESSAGE, _FDS)
                if not message:
                    for pid in self._pids.values():
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(pid, signal.SIGKILL)  # with what they have started, which would outlive them
                    return
                asked = json.loads(message)
                if "env" in asked:
                    self._fork(fds, asked["env"])
                elif asked["kill"] in self._pids.values():
                    os.kill(asked["kill"], signal.SIGKILL)

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

    def _bury(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        pid = self._pids.pop(pidfd)
        os.close(pidfd)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(
                pid, signal.SIGKILL
            )  # what it has started itself; its number is taken until somebody waits for it
        self._tell(ended=pid, status=os.waitpid(pid, 0)[1])

    def _tell(self, **what: int) -> None:
        with contextlib.suppress(OSError):  # the agent is gone: seen next
            self._agent.send(json.dumps(what).encode())


def _become_rank(fds: list[int], env: Mapping[str, str]) -> None:
    """In the child: never returns."""
    status = 1
    try:
        server = os.getppid()
        assert ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0
        if os.getppid() != server:  # it ended in between
            os._exit(status)
        os.setsid()
        os.environ.update(env)
        from raydist.launch.rank_main import run

        status = run(*fds)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        zygote.leave(status)
