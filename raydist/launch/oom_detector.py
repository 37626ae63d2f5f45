"""Whether a process was killed for want of memory, and how much it had: the kernel tells nobody but its own log.

Runs in: each rank's agent. Neither torch nor ray.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


class MemoryWatch:
    """Of one process, from its start. `look` now and then while it runs; `why` once it was killed."""

    def __init__(self, pid: int) -> None:
        self._statm, self._pid = Path(f"/proc/{pid}/statm"), pid
        self._kills = _kills()
        self._bytes = 0

    def look(self) -> None:
        """Notes how much it has; the kernel has forgotten once it is dead."""
        try:
            self._bytes = int(self._statm.read_text().split()[1]) * _PAGE or self._bytes
        except (OSError, IndexError):
            return

    def why(self) -> str:
        """What is known if the kernel has killed for want of memory on this host since the process began; else ""."""
        if _kills() == self._kills:
            return ""
        total = os.sysconf("SC_PHYS_PAGES") * _PAGE
        return (
            f"the kernel killed process {self._pid} for want of memory; it had {_mib(self._bytes)} when last looked at, the host "
            f"has {_mib(total)}, a container may have less"
        )


def _kills() -> int:
    """Processes that the kernel has killed for want of memory, of the host or of a cgroup, since boot."""
    found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
