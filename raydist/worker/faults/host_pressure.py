"""Faults of a rank's host: stops from outside, other processes on its processor, a CPU quota. They end by themselves.

Runs in: a rank of a run with faults. Neither torch nor ray.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from raydist.cgroups import cgroup
from raydist.worker.faults import InjectedError

_PAUSE = "for i in $(seq $4); do kill -STOP $1 && sleep $2 && kill -CONT $1 || exit 0; sleep $3; done"
_SPIN = "while kill -0 $1 2>/dev/null; do i=0; while [ $i -lt 10000 ]; do i=$((i+1)); done; done"
_PERIOD_US = 100_000


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
    found = cgroup("cpu")
    if found is None or found.inside is None:
        raise InjectedError("cpu_quota: this host has no control groups that this process can see")
    before = found.mount / found.inside
    own = found.mount / f"raydist-fault-{os.getpid()}"
    try:
        own.mkdir()
        if found.version == 2:
            (found.mount / "cgroup.subtree_control").write_text("+cpu")
            (own / "cpu.max").write_text(f"{int(cpus * _PERIOD_US)} {_PERIOD_US}")
        else:
            (own / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (own / "cpu.cfs_quota_us").write_text(str(int(cpus * _PERIOD_US)))
        (own / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        with contextlib.suppress(OSError):
            own.rmdir()
        raise InjectedError(f"cpu_quota: {error}; it needs root and a writable {found.mount}") from error
    # If this process is killed, or the kernel is not done with it in `end`, another one removes the group.
    _below(["sh", "-c", "while kill -0 $1 2>/dev/null && [ -d $2 ]; do sleep 1; done; rmdir $2 2>/dev/null", "sh",
            str(os.getpid()), str(own)], before)  # fmt: skip

    def end() -> None:
        with contextlib.suppress(OSError):
            (before / "cgroup.procs").write_text(str(os.getpid()))
            own.rmdir()

    return _later(seconds, end)


def _below(command: list[str], group: Path | None = None) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if group is not None:
        (group / "cgroup.procs").write_text(str(process.pid))
    return process


def _later(seconds: float, function: Callable[[], None]) -> Callable[[], None]:
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()
    return function
