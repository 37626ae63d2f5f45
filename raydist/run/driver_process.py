"""A driver's identity in files of a run, and whether its process still exists.

Runs in: the driver, and every reader. Must not import ray or torch.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from pathlib import Path
from typing import Any

LOST_AFTER_S = 30.0
"""A driver that has written no sign of life for this long is lost."""


def this_process(pid: int | None = None) -> dict[str, Any]:
    """A driver's identity in state.json and in its lease: {"host", "pid", "pids", "since"}.

    `pids` identifies the pid namespace; `since`, the Unix time of this call, distinguishes drivers with the same pid.
    """
    driver = {"host": socket.gethostname(), "pid": os.getpid() if pid is None else pid}
    return {**driver, "pids": _pid_namespace(), "since": time.time()}


def recent(at: float, now: float) -> bool:
    """Whether a sign of life at `at` counts at `now`. One further ahead is of a wrong clock, and tells nothing: the driver may have
    died since.
    """
    return abs(now - at) <= LOST_AFTER_S


def gone(driver: dict[str, Any]) -> bool:
    """Whether a driver from `this_process` ran on this host and its process has exited. False if it ran on another host."""
    here = driver.get("pids") == _pid_namespace() and driver["host"] == socket.gethostname()
    return here and not _alive(int(driver["pid"]))


def _alive(pid: int) -> bool:
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


@functools.cache
def _pid_namespace() -> str:
    """Identifies the pid namespace of this process: containers may have the same host name but different processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
