"""Where a control group of a process is: version 1 or 2, in a container or not.

Runs anywhere. Reads files only. Source, kernel documentation: admin-guide/cgroup-v1/memory, cgroup-v2.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Cgroup(NamedTuple):
    """The group of a process. `version`: of its controller. `mount`: the uppermost group that is visible here."""

    version: int
    mount: Path
    inside: Path | None
    """Relative to `mount`; None if the group is not below it, and so cannot be read."""


def memory_cgroup(process: int | str = "self", root: Path = Path("/")) -> Cgroup | None:
    """The memory control group of a process; None without control groups, or if it has exited. `root`: of /proc and /sys."""
    return cgroup("memory", process, root)


def cgroup(controller: str, process: int | str = "self", root: Path = Path("/")) -> Cgroup | None:
    """The group of a process for a controller, such as cpu or memory: see `memory_cgroup`."""
    groups: dict[str, str] = {}
    try:
        lines = (root / f"proc/{process}/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
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
        # A container without a cgroup namespace sees the host's path, but only its own part is mounted.
        inside = Path(path).relative_to(top) if Path(path).is_relative_to(top) and ".." not in path else None
        return Cgroup(version, root / place.lstrip("/"), inside)
    return None
