"""Restarts from checkpoints in the nodes' memory, with the whole command.

Over a minute: three runs, one of them with a Ray of its own.
"""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

from raydist.checkpoint.memory_layout import SHM
from raydist.faults import DamageCopy, Segfault
from raydist.ipc import mailbox
from raydist.observe import write_ahead_log
from raydist.run.directory import RunDir
from raydist.run.status import read_state
from tests.exact import exact

PLAIN = ("--set", "checkpoint.every=null", "--set", "recovery.snapshot_every=2")


def until_copied(process: Any) -> Path:
    """The run's folder in shared memory, once it has a committed snapshot and the driver has bound a socket in it."""
    found: list[Path] = []
    while not any(manifest for folder in found for manifest in folder.glob("checkpoints/*/MANIFEST-*")):
        assert process.poll() is None
        with contextlib.suppress(psutil.Error):
            bound = [str(c.laddr) for c in psutil.Process(process.inner).net_connections("unix")]
            found = [Path(path).parent for path in bound if path.startswith(f"{SHM}/raydist-")]
        time.sleep(0.2)  # a rank creates it; each look at the connections takes milliseconds
    return found[0]


def test_killed_ranks_go_on_from_memory(project: Any) -> None:
    """dp 2 x tensor 2 under zero1, four workers: SIGKILL of rank 3 in step 5, where the ranks wait until there is a copy, then of
    rank 0, without a checkpoint on storage: the steps since the newest copy are trained again, with the bits of an undisturbed run
    on that mesh, and one row a step. Then a bit of rank 2's copies changes, and the rank dies: they are rejected, and the run
    starts again."""
    mesh = ("--set", "cluster.workers=4", "--set", "parallel.tensor=2", "--set", "parallel.strategy=zero1")
    project.train("mesh", *mesh)
    options = project.options("mesh-killed", [[3, "step", 9], [0, "step", 13]], hold=9)
    faults = [DamageCopy(rank=2, step=12), Segfault(rank=2, step=12)]
    (project.root / "copies.yaml").write_text(yaml.safe_dump([fault.model_dump(mode="json") for fault in faults]))
    options += ["--faults", "copies.yaml", "--set", "recovery.max_failures=-1"]
    process = project.warm_start("train", "job.yaml", "--name", "mesh-killed", *PLAIN, *mesh, *options)
    folder = until_copied(process)
    (project.root / "marks" / "mesh-killed" / "go").touch()
    _, told = process.communicate(timeout=300)
    assert process.returncode == 0, told
    failed = [(e["rank"], e["cause"]) for e in project.events("mesh-killed", "failure")]
    assert [rank for rank, _ in failed] == [3, 0, 2], failed
    resumed = project.events("mesh-killed", "resumed")
    assert [e["source"] for e in resumed] == ["memory"] * 2
    assert resumed[0]["step"] in (2, 4)  # 4 only if the copy of 2 was committed before step 4
    assert resumed[1]["step"] >= resumed[0]["step"]
    (rejected,) = project.events("mesh-killed", "checkpoint_rejected")
    assert "/shard-00002-of-00004-" in rejected["file"]
    assert rejected["cause"].startswith("its bytes are not those that were written")
    assert exact(project.steps("mesh-killed")) == exact(project.steps("mesh"))
    assert project.weights("mesh-killed", 12) == project.weights("mesh", 12)
    assert not folder.exists()


def test_a_killed_driver_leaves_nothing_in_memory(project: Any) -> None:
    """SIGKILL of the driver while the ranks wait in step 8: when the last rank has exited its folder is deleted, and the monitor's
    journal; the run is lost, and no rank of it is left."""
    process = project.start(
        "train", "job.yaml", "--name", "memory-driverless", *PLAIN, *project.options("memory-driverless", hold=15)
    )
    folder = until_copied(process)
    run = RunDir(project.runs / "memory-driverless")
    _, journal = write_ahead_log._place(run.full_uri, read_state(run)["driver"])
    assert journal.exists()
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=300)
    deadline = time.monotonic() + 240
    while folder.exists() or journal.exists():
        assert time.monotonic() < deadline, "its memory is still taken"
        time.sleep(0.02)  # their cleaners delete them
    shown = project.show("memory-driverless")
    assert (shown["status"], shown["workers"]) == ("lost", [])
    assert 0 < shown["steps"] < 12
    assert not mailbox.folder(run.uri).exists()
