"""Control groups, version 1 and 2: the memory of this process's container, and how long a CPU quota has held a rank.

Runs in: the monitor of each node. Reads files only. Source, kernel documentation: admin-guide/cgroup-v1/memory, cgroup-v2.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from raydist.cgroups import cgroup, memory_cgroup


class _Kind(NamedTuple):
    """A version's files, and the entries of its memory.stat that the kernel reclaims before it kills a process."""

    limit: str
    used: str
    reclaimable: frozenset[str]


# Version 1 also has entries without `total_`, which exclude child groups; it does not report slabs.
_V1 = _Kind(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    frozenset({"total_active_file", "total_inactive_file"}),
)
_V2 = _Kind("memory.max", "memory.current", frozenset({"active_file", "inactive_file", "slab_reclaimable"}))


class MemoryGroup:
    """The control groups that hold this process, innermost first. `root`: where /proc and /sys are."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._levels: list[Path] = []
        found = memory_cgroup(root=root)
        if found is not None:
            self._kind = _V1 if found.version == 1 else _V2
            inside = found.inside or Path()
            levels = [found.mount / level for level in (inside, *inside.parents)]
            self._levels = [level for level in levels if (level / self._kind.limit).exists()]

    def read(self) -> tuple[int, int] | None:
        """(bytes in use that cannot be reclaimed, limit) of the group with the lowest limit; None if there is no limit."""
        lowest: tuple[int, Path] | None = None
        for level in self._levels:
            text = (level / self._kind.limit).read_text().strip()
            if text != "max" and (lowest is None or int(text) < lowest[0]):
                lowest = int(text), level
        if lowest is None:
            return None
        limit, level = lowest
        used = int((level / self._kind.used).read_text())
        for line in (level / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in self._kind.reclaimable:
                used -= int(value)
        return max(used, 0), limit


class CpuGroups:
    """How long CPU quotas have held processes back, from `cpu.stat` of their control groups. `root`: as in MemoryGroup."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._levels: dict[str, list[Path]] = {}

    def throttled_seconds(self, pid: int) -> float | None:
        """The total of the group, of those that hold the process, that was held back longest; None without a quota.

        Raises OSError if there is no such process.
        """
        own = f"{self._root}/proc/{pid}/cgroup"
        with open(own) as file:
            groups = file.read()
        if groups not in self._levels:
            self._levels = {groups: self._found(pid)}
        held = [seconds for level in self._levels[groups] if (seconds := _throttled(level)) is not None]
        return max(held, default=None)

    def _found(self, pid: int) -> list[Path]:
        found = cgroup("cpu", pid, self._root)
        if found is None:
            return []
        inside = found.inside or Path()
        files = [found.mount / level / "cpu.stat" for level in (inside, *inside.parents)]
        return [file for file in files if file.exists()]


def _throttled(stat: Path) -> float | None:
    """None if the group has had no quota: a group without one counts no periods."""
    with open(stat) as file:
        values = dict(line.split() for line in file.read().splitlines())
    if values.get("nr_periods", "0") == "0":
        return None
    nanoseconds, microseconds = values.get("throttled_time"), values.get("throttled_usec")  # version 1, version 2
    return int(nanoseconds) / 1e9 if nanoseconds is not None else int(microseconds) / 1e6 if microseconds else None
