"""Memory limits of control groups, read from files as kernels and containers present them."""

from __future__ import annotations

from pathlib import Path

import pytest

from raydist.observe.hardware.cgroup import MemoryGroup

V1_LINE = "4:memory:{}\n1:cpu:/\n0::/\n"
V1_MOUNT = "36 31 0:33 {} {} rw,relatime - cgroup cgroup rw,memory\n"
V2_MOUNT = "36 31 0:33 {} {} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
NONE = 9223372036854771712
"""The limit that version 1 shows if there is none."""


def system(root: Path, line: str, mounts: str, files: dict[str, str | int]) -> MemoryGroup:
    for name, text in {"proc/self/cgroup": line, "proc/self/mountinfo": mounts, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n" if isinstance(text, int) else text)
    return MemoryGroup(root)


def v1(folder: str, limit: int, used: int, cache: int) -> dict[str, str | int]:
    stat = f"cache {cache}\nactive_file 1\ntotal_active_file {cache // 4}\ntotal_inactive_file {cache // 2}\n"
    return {
        f"{folder}/memory.limit_in_bytes": limit,
        f"{folder}/memory.usage_in_bytes": used,
        f"{folder}/memory.stat": stat,
    }


def v2(folder: str, limit: int | str, used: int, cache: int) -> dict[str, str | int]:
    stat = f"file {cache}\nactive_file {cache // 4}\ninactive_file {cache // 4}\nslab_reclaimable {cache // 4}\n"
    return {f"{folder}/memory.max": limit, f"{folder}/memory.current": used, f"{folder}/memory.stat": stat}


def test_the_lowest_limit_above_counts(tmp_path: Path) -> None:
    """The lowest limit of the group and its parents counts, here the pod's; memory that the kernel reclaims before it kills is
    not counted as used."""
    group = system(
        tmp_path,
        V1_LINE.format("/pod/box"),
        V1_MOUNT.format("/", "/sys/fs/cgroup/memory"),
        v1("sys/fs/cgroup/memory", NONE, 9000, 0)
        | v1("sys/fs/cgroup/memory/pod", 2000, 1500, 400)
        | v1("sys/fs/cgroup/memory/pod/box", 3000, 1000, 0),
    )
    assert group.read() == (1500 - 300, 2000)


def test_version_2_in_a_namespace(tmp_path: Path) -> None:
    """In a cgroup namespace the container's own group is the root."""
    group = system(tmp_path, "0::/\n", V2_MOUNT.format("/", "/sys/fs/cgroup"), v2("sys/fs/cgroup", 5000, 4000, 1000))
    assert group.read() == (4000 - 750, 5000)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("6000\n")  # the limit changes while the process runs
    assert group.read() == (3250, 6000)


def test_version_2_without_a_limit(tmp_path: Path) -> None:
    """There is no limit: the root has no memory.max, and the service's is "max"."""
    files = v2("sys/fs/cgroup/system.slice/ray", "max\n", 4000, 1000)
    group = system(tmp_path, "0::/system.slice/ray\n", V2_MOUNT.format("/", "/sys/fs/cgroup"), files)
    assert group.read() is None


@pytest.mark.parametrize("path", ["/docker/abc", "/docker/abc/worker"])
def test_a_container_that_sees_the_hosts_names(tmp_path: Path, path: str) -> None:
    """The container's group is mounted under its path on the host."""
    mounts = V1_MOUNT.format("/docker/abc", "/sys/fs/cgroup/memory")
    below = path.removeprefix("/docker/abc")
    files = v1("sys/fs/cgroup/memory", 2000, 1000, 0) | v1(f"sys/fs/cgroup/memory{below}", 1500, 700, 0)
    assert system(tmp_path, V1_LINE.format(path), mounts, files).read() == (700, 1500)


def test_beside_version_1_the_unified_tree_does_not_count(tmp_path: Path) -> None:
    """If both versions are mounted, and version 1 has the memory controller, version 2 is ignored."""
    mounts = V2_MOUNT.format("/", "/sys/fs/cgroup/unified") + V1_MOUNT.format("/", "/sys/fs/cgroup/memory")
    files = v2("sys/fs/cgroup/unified", 1, 1, 0) | v1("sys/fs/cgroup/memory", 3000, 2000, 0)
    assert system(tmp_path, V1_LINE.format("/"), mounts, files).read() == (2000, 3000)


def test_of_this_machine() -> None:
    """On this machine, used memory does not exceed the limit, if there is one."""
    told = MemoryGroup().read()
    assert told is None or 0 < told[0] <= told[1]
