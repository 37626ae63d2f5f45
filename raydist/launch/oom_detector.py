"""Detects whether the kernel's OOM killer killed this rank, and its last known memory: a parent sees only a SIGKILL.

Runs in: each rank's agent. Neither torch nor ray.

The kernel counts each process that it kills for lack of memory in the control group of that process, before it sends the signal,
whether the group itself, a group above it or the whole host ran out (memory.events.local of version 2, memory.oom_control of
version 1; sources: kernel documentation, admin-guide/cgroup-v2 and cgroup-v1/memory). Kills in other groups, such as those of other
containers or of services, leave this counter as it is. Only the root group of version 2, which has the processes of a host without
an init that makes groups, has no counter: there the kills of all other groups are subtracted from those of the host.

What cannot be known: which process of a group was killed. If ranks share a group, the kernel kills one of them, and something
else sends SIGKILL to another, both are said to have lacked memory. Where the group of the rank is not visible, as in a container
that does not mount /sys/fs/cgroup, no kill is attributed to memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from raydist.cgroups import memory_cgroup

_PAGE = os.sysconf("SC_PAGE_SIZE")


class MemoryWatch:
    """Watches one process, from its start. Call `look` from time to time while it runs; `why` after it was killed by SIGKILL.

    `root`: where /proc and /sys are.
    """

    def __init__(self, pid: int, root: Path = Path("/")) -> None:
        self._pid, self._root, self._bytes = pid, root, 0
        self._groups = self._seen = self._read("cgroup")
        self._kills = _counter(pid, root)
        self._before = self._kills()

    def look(self) -> None:
        """Records its current memory, which cannot be read after it has exited, and whether it was moved to another group."""
        sizes = self._read("statm").split()
        if not sizes or sizes[1] == "0":
            return
        self._bytes = int(sizes[1]) * _PAGE
        before, self._seen = self._seen, self._read("cgroup")
        if self._seen == before != self._groups:  # twice: in version 1 a process that exits is shown in the root group
            self._groups, self._kills = self._seen, _counter(self._pid, self._root)
            self._before = self._kills()

    def why(self) -> str:
        """A text if the OOM killer has killed a process of this one's group since this object was created; else ""."""
        if self._kills() <= self._before:
            return ""
        total = os.sysconf("SC_PHYS_PAGES") * _PAGE
        return (
            f"the kernel killed process {self._pid} for lack of memory; it used {_mib(self._bytes)} at the last check, the host "
            f"has {_mib(total)}, a container may have less"
        )

    def _read(self, name: str) -> str:
        """A file of the process; "" once it has been reaped."""
        try:
            return (self._root / f"proc/{self._pid}" / name).read_text()
        except OSError:
            return ""


def _counter(pid: int, root: Path) -> Callable[[], int]:
    """Returns how many processes of the group of `pid` the OOM killer has killed; always 0 if this cannot be read."""
    found = memory_cgroup(pid, root)
    if found is None or found.inside is None:
        return lambda: 0
    # In version 2 the memory of a group without the controller belongs to the group above. Before Linux 5.2 there was no
    # memory.events.local; memory.events includes the groups below.
    names = ("memory.oom_control",) if found.version == 1 else ("memory.events.local", "memory.events")
    for level in (found.inside, *found.inside.parents):
        for name in names:
            if (file := found.mount / level / name).exists():
                return partial(_kills, file)
    if found.version == 1:
        return lambda: 0
    return lambda: _kills(root / "proc/vmstat") - sum(_kills(file) for file in found.mount.glob("*/memory.events"))


def _kills(file: Path) -> int:
    """The value of `oom_kill` in a file of the kernel; 0 if the group is gone."""
    try:
        found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
