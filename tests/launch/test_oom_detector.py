"""A kill by the kernel for lack of memory is distinguished from other kills, with real kills in a real cgroup."""

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
EATER = "import sys; sys.stdin.readline(); kept = [bytearray(1 << 20) for _ in range(1 << 12)]"


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup of 64 MiB without swap, of version 1 if it has the memory controller, else of version 2."""
    name = f"raydist-test-{os.getpid()}"
    old = Path("/sys/fs/cgroup/memory")
    folder = (old if old.exists() else Path("/sys/fs/cgroup")) / name
    folder.mkdir()
    (folder / ("memory.limit_in_bytes" if old.exists() else "memory.max")).write_text(str(LIMIT))
    swap = folder / ("memory.memsw.limit_in_bytes" if old.exists() else "memory.swap.max")
    if swap.exists():
        swap.write_text(str(LIMIT) if old.exists() else "0")
    yield folder
    folder.rmdir()


def test_the_kernels_kill(cgroup: Path) -> None:
    """The cause names the process and its memory."""
    with subprocess.Popen([sys.executable, "-c", EATER], stdin=subprocess.PIPE) as process:
        (cgroup / "cgroup.procs").write_text(str(process.pid))
        watch = MemoryWatch(process.pid)
        watch.look()
        process.communicate(b"go\n")
    assert process.returncode == -signal.SIGKILL
    watch.look()  # this must not forget the earlier kill
    told = re.search(rf"process {process.pid} for lack of memory; it used (\d+) MiB", watch.why())
    assert told
    assert 1 < int(told[1]) <= LIMIT >> 20


def test_anybody_elses_kill() -> None:
    """A SIGKILL that does not increase the kernel's count is not attributed to memory."""
    with subprocess.Popen([sys.executable, "-c", EATER], stdin=subprocess.PIPE) as process:
        watch = MemoryWatch(process.pid)
        watch.look()
        process.kill()
    assert watch.why() == ""
