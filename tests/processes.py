"""Whether processes are still running, and their command lines, also while they exit."""

from __future__ import annotations

import psutil


def runs(process: psutil.Process | int) -> bool:
    """Whether it is running; a zombie is not."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.is_running() and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_line(process: psutil.Process) -> str:
    """Its name and command line; "" if it has exited."""
    try:
        return f"{process.name()} {' '.join(process.cmdline())}"
    except psutil.NoSuchProcess:
        return ""
