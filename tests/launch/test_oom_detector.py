"""A kill by the kernel for lack of memory is distinguished from other kills, with real kills in real cgroups."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raydist.launch.oom_detector import MemoryWatch

LIMIT = 64 << 20
EATER = "import sys; print(flush=True); sys.stdin.readline(); kept = [bytearray(1 << 20) for _ in range(1 << 12)]"
OLD = Path("/sys/fs/cgroup/memory")
"""Where version 1 is mounted, if it has the memory controller."""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup of 64 MiB without swap, and one in it, `ranks`, without a limit of its own."""
    folder = (OLD if OLD.exists() else Path("/sys/fs/cgroup")) / f"raydist-test-{os.getpid()}"
    folder.mkdir()
    (folder / ("memory.limit_in_bytes" if OLD.exists() else "memory.max")).write_text(str(LIMIT))
    swap = folder / ("memory.memsw.limit_in_bytes" if OLD.exists() else "memory.swap.max")
    if swap.exists():
        swap.write_text(str(LIMIT) if OLD.exists() else "0")
    if not OLD.exists():
        (folder / "cgroup.subtree_control").write_text("+memory")
    (folder / "ranks").mkdir()
    yield folder / "ranks"
    (folder / "ranks").rmdir()
    folder.rmdir()


def started() -> subprocess.Popen[bytes]:
    """A process that runs, and takes memory without end once it gets a line."""
    process = subprocess.Popen([sys.executable, "-c", EATER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    return process


def test_the_kernels_kill(cgroup: Path) -> None:
    """The limit is that of a group above the rank's, as with a pod. The cause names the process and its memory. A process of
    another group that was killed at the same time, by somebody else, did not lack memory."""
    with started() as process, started() as other:
        (cgroup / "cgroup.procs").write_text(str(process.pid))
        watch, others = MemoryWatch(process.pid), MemoryWatch(other.pid)
        watch.look()
        process.communicate(b"go\n")
        other.kill()
    assert (process.returncode, other.returncode) == (-signal.SIGKILL, -signal.SIGKILL)
    watch.look()  # this must not forget the earlier kill
    told = re.search(rf"process {process.pid} for lack of memory; it used (\d+) MiB", watch.why())
    assert told
    assert 1 < int(told[1]) <= LIMIT >> 20
    assert others.why() == ""


def test_anybody_elses_kill(cgroup: Path) -> None:
    """A SIGKILL without lack of memory is not attributed to it."""
    with started() as process:
        (cgroup / "cgroup.procs").write_text(str(process.pid))
        watch = MemoryWatch(process.pid)
        process.kill()
    assert watch.why() == ""


HOST = "proc/vmstat"
OWN, BESIDE = "sys/fs/cgroup/pod/memory.events.local", "sys/fs/cgroup/other/memory.events"


@pytest.mark.parametrize(
    ("group", "top", "killed", "found"),
    [
        ("/pod", "/", [OWN, HOST], True),
        ("/pod", "/", [HOST, BESIDE], False),
        ("/pod/without-controller", "/", [OWN, HOST], True),
        ("/", "/", [HOST], True),
        ("/", "/", [HOST, BESIDE], False),
        ("/", "/", [HOST, "sys/fs/cgroup/pod/memory.events"], False),
        ("/../elsewhere", "/", [HOST], False),
        ("/pod", "/container", [HOST], False),
    ],
)
def test_version_2(tmp_path: Path, group: str, top: str, killed: list[str], found: bool) -> None:
    """The counter of the rank's own group decides, or of the group above that has its memory; in the root group, which has none,
    a kill of the host that no other group counts. A group that is not visible here is not guessed at."""

    def write(counts: int) -> None:
        for name in (HOST, OWN, BESIDE, "sys/fs/cgroup/pod/memory.events"):
            count = 3 + counts * (name in killed)
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"oom 9\noom_kill {count}\noom_group_kill 0\n")

    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/7").mkdir()
    (tmp_path / "proc/7/cgroup").write_text(f"0::{group}\n")
    mount = f"36 31 0:33 {top} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
    (tmp_path / "proc/self/mountinfo").write_text(mount)
    write(0)
    watch = MemoryWatch(7, tmp_path)
    assert watch.why() == ""
    write(1)
    assert bool(watch.why()) == found
