"""Restarts from the nodes' memory, as a user sees them."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from raydist.checkpoint.memory_layout import SHM
from tests.end_to_end.conftest import exact

PLAIN = ("--set", "checkpoint.every=null", "--set", "recovery.snapshot_every=2")


def until_copied(process: Any) -> Path:
    """The run's folder in shared memory, whose bell its driver hears, once a snapshot in it is committed."""
    found: list[Path] = []
    while not any(manifest for folder in found for manifest in folder.glob("checkpoints/*/MANIFEST-*")):
        assert process.poll() is None
        with contextlib.suppress(psutil.Error):
            bound = [str(c.laddr) for c in psutil.Process(process.pid).net_connections("unix")]
            found = [Path(path).parent for path in bound if path.startswith(f"{SHM}/raydist-")]
        time.sleep(0.02)  # a rank makes it
    return found[0]


def test_killed_ranks_go_on_from_memory(project: Any, undisturbed: dict[str, Any]) -> None:
    """SIGKILL of rank 0 in step 6, where the ranks wait until there is a copy, then of rank 1, with no checkpoint on storage: the
    steps since the newest copy are trained again, to the same bits, and one row a step."""
    options = project.options("memory-killed", [[0, "step", 11], [1, "step", 13]], hold=11)
    process = project.start("train", "job.yaml", "--name", "memory-killed", *PLAIN, *options)
    folder = until_copied(process)
    (project.root / "marks" / "memory-killed" / "go").touch()
    _, told = process.communicate(timeout=240)
    assert process.returncode == 0, told
    resumed = project.events("memory-killed", "resumed")
    assert [e["source"] for e in resumed] == ["memory", "memory"]
    assert resumed[0]["step"] in (2, 4)
    assert resumed[1]["step"] >= resumed[0]["step"]
    assert exact(project.steps("memory-killed")) == exact(undisturbed["rows"])
    assert project.weights("memory-killed", 12) == undisturbed["weights"]
    assert not folder.exists()


def test_a_killed_driver_leaves_nothing_in_memory(project: Any) -> None:
    """SIGKILL of the driver in the middle: the folder goes when the last rank has."""
    process = project.start(
        "train", "job.yaml", "--name", "memory-driverless", *PLAIN, *project.options("memory-driverless", hold=15)
    )
    folder = until_copied(process)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    deadline = time.monotonic() + 30
    while folder.exists():
        assert time.monotonic() < deadline, "its memory is still taken"
        time.sleep(0.02)  # its cleaner removes it
