"""Detects whether the kernel's OOM killer killed a process, and its last known memory: the kernel reports it in its log only.

Runs in: each rank's agent. Neither torch nor ray.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


class MemoryWatch:
    """Watches one process, from its start. Call `look` from time to time while it runs; `why` after it was killed."""

    def __init__(self, pid: int) -> None:
        self._statm, self._pid = Path(f"/proc/{pid}/statm"), pid
        self._kills = _kills()
        self._bytes = 0

    def look(self) -> None:
        """Records its current memory, which cannot be read after it has exited."""
        try:
            self._bytes = int(self._statm.read_text().split()[1]) * _PAGE or self._bytes
        except (OSError, IndexError):
            return

    def why(self) -> str:
        """A text if the OOM killer has killed a process on this host since this object was created; else ""."""
        if _kills() == self._kills:
            return ""
        total = os.sysconf("SC_PHYS_PAGES") * _PAGE
        return (
            f"the kernel killed process {self._pid} for lack of memory; it used {_mib(self._bytes)} at the last check, the host "
            f"has {_mib(total)}, a container may have less"
        )


def _kills() -> int:
    """Number of processes killed by the OOM killer since boot, for the host or a cgroup."""
    found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
