"""Faults of a rank's host: stops from outside, other processes on its processor, a CPU quota, no pids, no memory, a full /dev/shm.
They end by themselves.

Runs in: a rank of a run with faults. Neither torch nor ray.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from raydist.cgroups import cgroup
from raydist.worker.faults import InjectedError

_PAUSE = "for i in $(seq $4); do kill -STOP $1 && sleep $2 && kill -CONT $1 || exit 0; sleep $3; done"
_SPIN = "while kill -0 $1 2>/dev/null; do i=0; while [ $i -lt 10000 ]; do i=$((i+1)); done; done"
_REMOVE = "while kill -0 $1 && [ -d $2 ]; do sleep 1; done; while [ -d $2 ] && ! rmdir $2; do sleep 1; done"
_PERIOD_US = 100_000
_NOTICED_S = 1.0
"""In which those that watch a process notice its new control group, where the kernel counts its kill (launch/oom_detector.py)."""
_STARVED_S = 20.0
_SHM = "/dev/shm"
_REFILLED_S = 0.05
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

    with _own_group("cpu_quota", "cpu", os.getpid()) as (group, version, end):
        if version == 2:
            (group / "cpu.max").write_text(f"{int(cpus * _PERIOD_US)} {_PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(int(cpus * _PERIOD_US)))
    return _later(seconds, end)


def starve(fault: str, pid: int) -> None:
    """Moves a process into a control group without memory, and returns when the kernel has killed it, as soon as it needs some.

    Raises InjectedError if this process may not, or the other one needed none for _STARVED_S.
    """
    with _own_group(fault, "memory", pid) as (group, version, end):
        limit = group / ("memory.max" if version == 2 else "memory.limit_in_bytes")
        time.sleep(_NOTICED_S)
        latest = time.monotonic() + _STARVED_S
        while str(pid) in _members(group):
            with contextlib.suppress(OSError):
                # Version 1 refuses a limit below what is used, but takes back what it had reserved for the group.
                limit.write_text("0")
            if version == 1:
                with contextlib.suppress(OSError):  # more is used by now
                    limit.write_text((group / "memory.usage_in_bytes").read_text())
            if time.monotonic() > latest:
                end()
                raise InjectedError(f"{fault}: process {pid} needed no memory for {_STARVED_S:.0f} s")
            time.sleep(0.02)


def no_processes(seconds: float) -> threading.Timer:
    """This process can start neither a process nor a thread; returns the thread that ends that. Raises InjectedError."""
    if os.geteuid() == 0:  # RLIMIT_NPROC does not hold for root
        with _own_group("no_processes", "pids", os.getpid()) as (group, _, end):
            timer = _timer(seconds, end)
            (group / "pids.max").write_text(str(len(os.listdir("/proc/self/task"))))
        return timer
    before = resource.getrlimit(resource.RLIMIT_NPROC)
    timer = _timer(seconds, lambda: resource.setrlimit(resource.RLIMIT_NPROC, before))
    resource.setrlimit(resource.RLIMIT_NPROC, (1, before[1]))
    return timer


def fill_shared_memory(seconds: float, limit_mb: int) -> Callable[[], None]:
    """Takes every free page of /dev/shm, and those that others free meanwhile. Returns what gives them back earlier; the kernel
    does if this process is killed, because the file has no name.

    Raises InjectedError, and takes nothing, if more than that is free, it would take half of the available memory, or another user
    has files there.
    """
    free = _free()
    others = [entry.name for entry in os.scandir(_SHM) if entry.stat(follow_symlinks=False).st_uid != os.geteuid()]
    if others:
        raise InjectedError(f"full_shared_memory: {_SHM}/{others[0]} is another user's, who needs that memory, too")
    if free > limit_mb << 20:
        raise InjectedError(f"full_shared_memory: limit_mb: {limit_mb}, but {free >> 20} MiB of {_SHM} are free")
    if 2 * free > psutil.virtual_memory().available:
        raise InjectedError(f"full_shared_memory: {free >> 20} MiB are over half of this host's available memory")
    file = os.open(_SHM, os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)
    taken, ended = _take(file, 0), threading.Event()

    def hold() -> None:
        until, size = time.monotonic() + seconds, taken
        while not ended.wait(_REFILLED_S) and time.monotonic() < until:
            size = _take(file, size)
        os.ftruncate(file, 0)  # first: a process that this one has forked holds the file, too
        os.close(file)

    holder = threading.Thread(target=hold, name="raydist-fault", daemon=True)
    holder.start()

    def end() -> None:
        ended.set()
        holder.join()

    return end


def _take(file: int, size: int) -> int:
    """Makes a file of that size as large as its file system has room for; returns its new size."""
    chunk = max(_free(), 1) // mmap.PAGESIZE * mmap.PAGESIZE
    while chunk >= mmap.PAGESIZE:
        try:
            os.posix_fallocate(file, size, chunk)
            size += chunk
            chunk = _free() // mmap.PAGESIZE * mmap.PAGESIZE
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            chunk = chunk // 2 // mmap.PAGESIZE * mmap.PAGESIZE
    return size


def _free() -> int:
    space = os.statvfs(_SHM)
    return space.f_bavail * space.f_frsize


@contextlib.contextmanager
def _own_group(fault: str, controller: str, pid: int) -> Iterator[tuple[Path, int, Callable[[], None]]]:
    """Moves a process into a control group of its own, whose limits the body sets. Yields the group, the controller's version, and
    what moves the process back. Raises InjectedError if this process may not.
    """
    found = cgroup(controller, pid)
    if found is None or found.inside is None:
        raise InjectedError(f"{fault}: this host has no control groups that this process can see")
    before = found.mount / found.inside
    own = found.mount / f"raydist-fault-{pid}"

    def end() -> None:
        with contextlib.suppress(OSError):
            for each in _members(own):  # children, too
                (before / "cgroup.procs").write_text(each)
            own.rmdir()

    try:
        own.mkdir()
        # If the process is killed, or the kernel is not done with it in `end`, another one removes the group, which is not ended
        # with this one.
        subprocess.run(
            ["setsid", "--fork", "sh", "-c", _REMOVE, "sh", str(pid), str(own)], check=True, cwd="/", **_NOWHERE
        )
        if found.version == 2:
            (found.mount / "cgroup.subtree_control").write_text(f"+{controller}")
        (own / "cgroup.procs").write_text(str(pid))
        yield own, found.version, end
    except OSError as error:
        end()
        raise InjectedError(f"{fault}: {error}; it needs root and a writable {found.mount}") from error


def _members(group: Path) -> list[str]:
    """The pids in it; [] once it has been removed."""
    try:
        return (group / "cgroup.procs").read_text().split()
    except OSError:
        return []


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
