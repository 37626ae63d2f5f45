"""The memory of this process's container: limit and usage. Control groups of version 1 and 2.

Runs in: the monitor of each node. Reads files only. Source, kernel documentation: admin-guide/cgroup-v1/memory, cgroup-v2.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from raydist.cgroups import memory_cgroup


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
