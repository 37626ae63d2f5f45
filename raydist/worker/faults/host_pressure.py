"""Faults of a rank's host: stops from outside, other processes on its processor, a CPU quota, no pids. They end by themselves.

Runs in: a rank of a run with faults. Neither torch nor ray.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raydist.cgroups import cgroup
from raydist.worker.faults import InjectedError

_PAUSE = "for i in $(seq $4); do kill -STOP $1 && sleep $2 && kill -CONT $1 || exit 0; sleep $3; done"
_SPIN = "while kill -0 $1 2>/dev/null; do i=0; while [ $i -lt 10000 ]; do i=$((i+1)); done; done"
_REMOVE = "while kill -0 $1 && [ -d $2 ]; do sleep 1; done; while [ -d $2 ] && ! rmdir $2; do sleep 1; done"
_PERIOD_US = 100_000
_NOWHERE: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)


def pause(seconds: float, gap: float, stops: int) -> None:
    """Another process stops this one for `seconds`, `stops` times; it ends when this process has."""
    given = (str(os.getpid()), str(seconds), str(gap), str(stops))
    _below(["sh", "-c", _PAUSE, "sh", *given])


def hog(seconds: float, processes: int) -> Callable[[], None]:
    """Limits this thread to one of its processors, and starts processes that compute on it. Returns what ends it earlier."""
    thread, allowed = threading.get_native_id(), os.sched_getaffinity(0)
    os.sched_setaffinity(thread, {min(allowed)})
    started = [_below(["sh", "-c", _SPIN, "sh", str(os.getpid())]) for _ in range(processes)]

    def end() -> None:
        os.sched_setaffinity(thread, allowed)
        for process in started:
            process.kill()
            process.wait()

    return _later(seconds, end)


def quota(seconds: float, cpus: float) -> Callable[[], None]:
    """Moves this process into a control group of its own with that quota, and back; returns what ends it earlier.

    Raises InjectedError if it may not.
    """

    def limit(group: Path, version: int) -> None:
        if version == 2:
            (group / "cpu.max").write_text(f"{int(cpus * _PERIOD_US)} {_PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(int(cpus * _PERIOD_US)))

    end, _ = _in_own_group("cpu_quota", "cpu", seconds, limit)
    return end


def no_processes(seconds: float) -> threading.Timer:
    """This process can start neither a process nor a thread; returns the thread that ends that. Raises InjectedError."""
    if os.geteuid() == 0:  # RLIMIT_NPROC does not hold for root

        def limit(group: Path, version: int) -> None:
            (group / "pids.max").write_text(str(len(os.listdir("/proc/self/task"))))

        return _in_own_group("no_processes", "pids", seconds, limit)[1]
    before = resource.getrlimit(resource.RLIMIT_NPROC)
    timer = _timer(seconds, lambda: resource.setrlimit(resource.RLIMIT_NPROC, before))
    resource.setrlimit(resource.RLIMIT_NPROC, (1, before[1]))
    return timer


def _in_own_group(
    fault: str, controller: str, seconds: float, limit: Callable[[Path, int], None]
) -> tuple[Callable[[], None], threading.Timer]:
    """Moves this process into a control group of its own, and back. `limit` sets its limits, when it is in it. Returns what ends it
    earlier, and the thread that ends it.
    """
    found = cgroup(controller)
    if found is None or found.inside is None:
        raise InjectedError(f"{fault}: this host has no control groups that this process can see")
    before = found.mount / found.inside
    own = found.mount / f"raydist-fault-{os.getpid()}"

    def end() -> None:
        with contextlib.suppress(OSError):
            for pid in (own / "cgroup.procs").read_text().split():  # children, too
                (before / "cgroup.procs").write_text(pid)
            own.rmdir()

    try:
        own.mkdir()
        # If this process is killed, or the kernel is not done with it in `end`, another one removes the group, which is not ended
        # with this one.
        subprocess.run(["setsid", "--fork", "sh", "-c", _REMOVE, "sh", str(os.getpid()), str(own)],
                       check=True, cwd="/", **_NOWHERE)  # fmt: skip
        if found.version == 2:
            (found.mount / "cgroup.subtree_control").write_text(f"+{controller}")
        (own / "cgroup.procs").write_text(str(os.getpid()))
        timer = _timer(seconds, end)
        limit(own, found.version)
    except OSError as error:
        end()
        raise InjectedError(f"{fault}: {error}; it needs root and a writable {found.mount}") from error
    return end, timer


def _below(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, **_NOWHERE)


def _later(seconds: float, function: Callable[[], None]) -> Callable[[], None]:
    _timer(seconds, function)
    return function


def _timer(seconds: float, function: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()
    return timer
