"""Watches the central processes of a private Ray: GCS, raylet, the coordinator and the run's monitor, by their state in /proc.

Runs in: the driver, in a thread. Never imports torch or ray: it asks the kernel, which answers whatever has become of Ray.

A dead GCS or raylet does not come back, and Ray's client would end this process without a message. A process that is stopped
(SIGSTOP, a debugger, a frozen cgroup) may go on: only its silence counts, as with the head of a cluster. A stopped monitor is
killed, because Ray then starts it again.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from raydist.launch.oom_detector import MemoryWatch

LOOK_S = 0.25
GCS_S = 5.0
MONITOR_S = 10.0
"""How long a monitor may be stopped before it is killed."""
ZYGOTE = "zygote"
"""The process from which Ray's workers are forked. If it exits, Ray starts workers as it does by itself."""
_EXITED = ("", "Z", "X")
_EXIT_LOOK_S = 0.01
_KILLED = ", killed by SIGKILL"
_ACTORS = {"ray::Coordinator": "coordinator", "ray::RunMonitor": "monitor", "ray::WarmMonitor": "monitor"}


class PrivateHead:
    """Looks every LOOK_S, from its construction to `close`. `processes`: name -> pid of children of this process: GCS, raylet,
    ZYGOTE."""

    def __init__(self, address: str, processes: Mapping[str, int]) -> None:
        self.address, self._processes = address, dict(processes)
        self._memory = {pid: MemoryWatch(pid) for name, pid in processes.items() if name != ZYGOTE}
        self._well = time.monotonic()
        self._stopped: dict[tuple[str, int], float] = {}
        """(name, pid) -> since when it has been stopped."""
        self._monitors: list[int] = []
        """As last seen: the actors of a dead raylet have no parent."""
        self._dead = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="raydist-head", daemon=True)
        self._thread.start()

    @property
    def silent_s(self) -> float:
        """Seconds since all central processes, but monitors, were last running."""
        return time.monotonic() - self._well

    @property
    def dead(self) -> bool:
        """Whether the GCS or the raylet has exited: neither is started again."""
        return bool(self._dead)

    @property
    def patience_s(self) -> float:
        """How long a run may go on without the dead process. Without the GCS the ranks can save a checkpoint."""
        return 0.0 if self._dead.startswith("Ray's raylet") else GCS_S

    def why(self, seconds: float) -> str:
        """What is wrong, for a run's cause."""
        if self._dead:
            return self._dead
        names = " and ".join(f"{name} (process {pid})" for name, pid in sorted(self._stopped) if name != "monitor")
        return f"Ray's {names or 'head'} has been stopped, as by SIGSTOP, for {seconds:.0f} s"

    def end_monitors(self) -> None:
        """Kills the monitors of a dead head, which nothing starts again, and returns when they have exited: what they still write
        would replace what the driver has written.
        """
        ours = [pid for pid in self._monitors if _actor(pid) == "monitor"]
        for pid in ours:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        while any(_state(pid) not in _EXITED for pid in ours):
            time.sleep(_EXIT_LOOK_S)

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_S):
            self._look(time.monotonic())

    def _look(self, now: float) -> None:
        for name, pid in self._processes.items():
            if not self._dead and name != ZYGOTE and _state(pid) in _EXITED and (how := _how(pid)) is not None:
                starved = self._memory[pid].why() if how == _KILLED else ""
                self._dead = f"Ray's {name} (process {pid}) has exited{how}{starved and f': {starved}'}"
        if self._dead:
            return
        for memory in self._memory.values():
            memory.look()
        parents = [pid for name, pid in self._processes.items() if name != "GCS"]
        watched = [*self._processes.items(), *(actor for pid in parents for actor in _actors(pid))]
        self._monitors = [pid for name, pid in watched if name == "monitor"]
        stopped = {one for one in watched if _state(one[1]) in ("T", "t")}
        self._stopped = {one: self._stopped.get(one, now) for one in stopped}
        for (name, pid), since in self._stopped.items():
            if name == "monitor" and now - since > MONITOR_S:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        if all(name == "monitor" for name, _ in self._stopped):
            self._well = now


def well(pid: int) -> bool:
    """Whether the process runs: it has neither exited nor been stopped."""
    return _state(pid) not in (*_EXITED, "T", "t")


def _state(pid: int) -> str:
    """The letter of proc(5): R, S, D, Z, T, ...; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""


def _how(pid: int) -> str | None:
    """How a child has ended; it is not reaped. None: other threads of it are still ending, after its first one."""
    try:
        facts = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:  # it is no child, or was reaped
        return ""
    if facts is None:
        return None
    if facts.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
        with suppress(ValueError):
            return f", killed by {signal.Signals(facts.si_status).name}"
    return f" with exit code {facts.si_status}"


def _actors(parent: int) -> list[tuple[str, int]]:
    """(name, pid) of the process's children that are coordinators or monitors."""
    with suppress(OSError):
        children = map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
        return [(name, pid) for pid in children if (name := _actor(pid))]
    return []


def _actor(pid: int) -> str:
    """Of a run: "coordinator", "monitor", or "" for any other process, or none."""
    with suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        return next((name for mark, name in _ACTORS.items() if line.startswith(mark)), "")
    return ""
