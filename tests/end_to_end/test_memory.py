"""Restarts from the nodes' memory, as a user sees them."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from raydist.worker.checkpoint.vaultdir import SHM
from tests.end_to_end.test_exactness import exact

PLAIN = ("--set", "checkpoint.every=null", "--set", "recovery.snapshot_every=2")


def vaults() -> set[str]:
    return {p.name for p in SHM.glob("raydist-*")}


@pytest.fixture(scope="module")
def undisturbed(project: Any) -> dict[str, Any]:
    """A run of 12 steps in which nothing happens; nothing of it stays in memory."""
    before = vaults()
    shown = project.train("memory-undisturbed", *PLAIN)
    assert vaults() <= before
    return {
        "rows": project.steps("memory-undisturbed"),
        "weights": project.weights("memory-undisturbed", 12),
        "shown": shown,
    }


def until_copied(process: Any, before: set[str]) -> None:
    """A snapshot of the run is committed."""
    while not any((SHM / name).glob("checkpoints/*/MANIFEST-*") for name in vaults() - before):
        assert process.poll() is None
        time.sleep(0.02)  # a rank makes it


def test_killed_ranks_go_on_from_memory(project: Any, undisturbed: dict[str, Any]) -> None:
    """SIGKILL of rank 0 in step 6, where the ranks wait until there is a copy, then of rank 1, with no checkpoint on storage: the
    steps since the newest copy are trained again, to the same bits, and one row a step."""
    before = vaults()
    options = project.options("memory-killed", [[0, "step", 11], [1, "step", 13]], hold=11)
    process = project.start("train", "job.yaml", "--name", "memory-killed", *PLAIN, *options)
    until_copied(process, before)
    (project.root / "marks" / "memory-killed" / "go").touch()
    _, told = process.communicate(timeout=240)
    assert process.returncode == 0, told
    resumed = project.events("memory-killed", "resumed")
    assert [e["source"] for e in resumed] == ["memory", "memory"]
    assert resumed[0]["step"] in (2, 4)
    assert resumed[1]["step"] >= resumed[0]["step"]
    assert exact(project.steps("memory-killed")) == exact(undisturbed["rows"])
    assert project.weights("memory-killed", 12) == undisturbed["weights"]
    assert vaults() <= before


def test_a_killed_driver_leaves_nothing_in_memory(project: Any) -> None:
    """SIGKILL of the driver in the middle: the folder goes when the last rank has."""
    before = vaults()
    process = project.start(
        "train", "job.yaml", "--name", "memory-driverless", *PLAIN, *project.options("memory-driverless", hold=15)
    )
    until_copied(process, before)
    (made,) = vaults() - before
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    deadline = time.monotonic() + 30
    while (SHM / made).exists():
        assert time.monotonic() < deadline, "its memory is still taken"
        time.sleep(0.02)  # its keeper removes it
