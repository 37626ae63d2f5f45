"""Control groups, version 1 and 2: the memory of this process's container, and how long a CPU quota has held a rank.

Runs in: the monitor of each node. Reads files only. Source, kernel documentation: admin-guide/cgroup-v1/memory, cgroup-v2.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


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
        found = _find(root, "memory")
        if found is not None:
            version, mount, innermost = found
            self._kind = _V1 if version == 1 else _V2
            while True:
                if (innermost / self._kind.limit).exists():
                    self._levels.append(innermost)
                if innermost == mount:
                    break
                innermost = innermost.parent

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
        found = _find(self._root, "cpu", str(pid))
        if found is None:
            return []
        _, mount, innermost = found
        levels = [innermost, *innermost.parents]
        inside = [level for level in levels if level.is_relative_to(mount)]
        return [level / "cpu.stat" for level in inside if (level / "cpu.stat").exists()]


def _throttled(stat: Path) -> float | None:
    """None if the group has had no quota: a group without one counts no periods."""
    with open(stat) as file:
        values = dict(line.split() for line in file.read().splitlines())
    if values.get("nr_periods", "0") == "0":
        return None
    nanoseconds, microseconds = values.get("throttled_time"), values.get("throttled_usec")  # version 1, version 2
    return int(nanoseconds) / 1e9 if nanoseconds is not None else int(microseconds) / 1e6 if microseconds else None


def _find(root: Path, controller: str, pid: str = "self") -> tuple[int, Path, Path] | None:
    """The version that has the controller, its mount point, and the process's group below it."""
    own = root / f"proc/{pid}/cgroup"
    if not own.exists():
        return None  # a kernel without control groups
    groups: dict[str, str] = {}
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        top, place = left.split()[3:5]
        system, _, options = right.split()[:3]
        if system == "cgroup" and controller in options.split(",") and controller in groups:
            version, path = 1, groups[controller]
        elif system == "cgroup2" and controller not in groups and "" in groups:
            version, path = 2, groups[""]
        else:
            continue
        mount = root / place.lstrip("/")
        # A container without a cgroup namespace sees the host's path, but only its own part is mounted.
        inside = Path(path).relative_to(top) if Path(path).is_relative_to(top) else Path()
        return version, mount, mount / inside
    return None
