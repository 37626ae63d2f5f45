"""A run on Ray whose storage fails, or whose lease another driver takes: one clear error. One in a bucket that is killed.

Over a minute: a driver of its own is killed, with its Ray.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from raydist.run.directory import RunDir
from raydist.run.driver_process import this_process
from raydist.run.log import read_events
from raydist.storage import Storage
from tests import needs
from tests.exact import weights

pytestmark = pytest.mark.usefixtures(
    "s3"
)  # its server runs to the session's end: it starts before what this file may not leave


def test_storage_that_takes_no_checkpoint_stops_the_run_with_one_cause(project: Any) -> None:
    """With read-only checkpoints: exit code 3 and SavesFailed after three failed saves, without a restart in between."""
    needs.require("mount")
    folder = project.runs / "read-only" / "checkpoints"
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "raydist-test", str(folder)], check=True)
    try:
        done = project.warm("train", "job.yaml", "--name", "read-only", "--set", "model.name=gpt")
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
    assert done.returncode == 3, done.stderr
    assert "SavesFailed: 3 saves in a row failed up to step 12" in done.stderr
    assert "Read-only file system" in done.stderr
    assert [e["step"] for e in project.events("read-only", "checkpoint_failed")] == [3, 6, 9]
    assert len(project.events("read-only", "attempt_started")) == 1


def test_a_driver_that_lost_its_run_ends(project: Any) -> None:
    """Another driver has taken over while this one could not renew its lease: exit code 3, and the other driver's file is
    unchanged."""
    command = ["train", "job.yaml", "--name", "taken-over", "--set", "model.name=gpt", "--set", "train.steps=100000"]
    process = project.warm_start(*command)
    run = RunDir(project.runs / "taken-over")
    for line in process.stderr:
        if "step" in line:
            break
    other = {"driver": {**this_process(), "host": "elsewhere", "pid": 77}, "key": "theirs", "ended": False}
    run.storage.write("drivers/000002.json", json.dumps({**other, "renewed_at": time.time()}).encode())
    _, said = process.communicate(timeout=300)
    assert process.returncode == 3, said
    assert "another driver has taken over, process 77 on elsewhere" in said
    assert json.loads(Path(run.uri, "drivers/000002.json").read_text())["key"] == "theirs"
    assert project.events("taken-over", "ended") == [], "the other driver writes the end"


def test_a_killed_driver_goes_on_on_an_object_store(project: Any, s3: Any, undisturbed: dict[str, Any]) -> None:
    """SIGKILL of the driver in step 8 of a run in a bucket. The same command takes the lease over, resumes from the checkpoint in
    the bucket, and ends with the weights of an undisturbed run, bit for bit."""
    home = s3.uri("killed")
    (project.root / "kill-driver.yaml").write_text("- {fault: kill_driver, step: 8}\n")
    command = ["train", "job.yaml", "--name", "on-s3", "--storage", home, *project.options("on-s3")]
    killed = project.raydist(*command, "--faults", "kill-driver.yaml")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    run = RunDir(Storage(home).at("on-s3"))
    left = run.committed()  # a rank may still commit step 6: it ends a moment after its driver
    assert left in ([3], [3, 6]), "of a step that was being saved there is no manifest"
    again = project.warm(*command)
    assert again.returncode == 0, again.stderr
    (resumed,) = [event.data for event in read_events(run) if event.kind == "resumed"]
    assert resumed["step"] in (3, 6)
    assert resumed["step"] >= left[-1]
    assert "drivers/000002.json" in run.storage.files("drivers"), "the lease of the second driver"
    assert weights(run, 12) == undisturbed["weights"]
