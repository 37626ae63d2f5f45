"""Whatever dies, the run ends with the bits of a run in which nothing did."""

from __future__ import annotations

import json
import os
import shutil
import signal
from typing import Any

import pytest

from tests.end_to_end.conftest import exact
from tests.stderr import without_stages


def assert_same(project: Any, name: str, undisturbed: dict[str, Any]) -> None:
    """Records, weights, optimizer state and eval loss are those of the undisturbed run, bit for bit; one row a step."""
    assert exact(project.steps(name)) == exact(undisturbed["rows"])
    assert project.weights(name, 12) == undisturbed["weights"]
    shown = project.show(name)
    assert (shown["status"], shown["eval_loss"]) == ("finished", undisturbed["shown"]["eval_loss"])


def test_killed_ranks_and_saves_leave_no_trace(project: Any, undisturbed: dict[str, Any]) -> None:
    """SIGKILL of rank 0 in step 2, of rank 1 in step 3, of rank 1 while it saves step 6, of rank 0 while it saves step 9: one
    run, the same bits. More deaths than max_failures, for there is progress between them.

    A step has two micro-batches a rank. A save of rank 1 syncs one file, its shard; rank 0 the manifest as well, and one file
    for the lease of what it restores.
    """
    kill = [[0, "step", 3], [1, "step", 5], [1, "fsync", 2], [0, "fsync", 5]]
    shown = project.train("killed", kill=kill)
    assert len(list((project.root / "marks" / "killed").iterdir())) == len(kill)
    failures = project.events("killed", "failure")
    assert len(failures) == len(kill)
    assert [(f["rank"], f["fault"]) for f in failures] == [(rank, "worker_died") for rank, _, _ in kill]
    assert len(shown["attempts"]) == len(kill) + 1
    assert_same(project, "killed", undisturbed)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_killed_ranks_leave_no_trace_when_sharded(project: Any, strategy: str) -> None:
    """The same where no rank has all of the state: SIGKILL of rank 1 in step 4, and of rank 0 while it saves step 6."""
    sharded = ("--set", f"parallel.strategy={strategy}")
    shown = project.train(f"{strategy}-undisturbed", *sharded)
    rows = project.steps(f"{strategy}-undisturbed")
    killed = project.train(f"{strategy}-killed", *sharded, kill=[[1, "step", 7], [0, "fsync", 3]])
    assert len(killed["attempts"]) == 3
    whole = {"rows": rows, "weights": project.weights(f"{strategy}-undisturbed", 12), "shown": shown}
    assert_same(project, f"{strategy}-killed", whole)


def test_a_killed_driver_resumes_by_the_same_command(project: Any, undisturbed: dict[str, Any]) -> None:
    """SIGKILL of the driver once a checkpoint is there: the run shows as lost, no worker survives, and the same command
    ends it with the same bits."""
    hold = 15  # in step 8, with the checkpoint of step 6 behind it
    process = project.start("train", "job.yaml", "--name", "driverless", *project.options("driverless", hold=hold))
    assert process.stderr is not None
    for line in process.stderr:
        if "checkpoint" in line and "6" in line:
            break
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    shown = project.show("driverless")
    assert shown["status"] == "lost"
    assert 0 < shown["steps"] < 12
    assert shown["workers"] == []
    (project.root / "marks" / "driverless" / "go").touch()
    project.train("driverless", hold=hold)
    assert_same(project, "driverless", undisturbed)


def test_paused_and_resumed_as_if_never_paused(project: Any, undisturbed: dict[str, Any]) -> None:
    """--until 5 (between checkpoints) commits step 5 and says paused; the same again does nothing; --until 9 goes on. A byte is
    flipped in that newest checkpoint: verify names the file and exits 3; without --until the run takes the one before, says so, and
    ends with the same bits; once finished it says so."""
    assert project.train("paused", "--until", "5")["status"] == "paused"
    shown = project.train("paused", "--until", "5")
    assert (shown["status"], shown["steps"], shown["checkpoints"][-1]["step"]) == ("paused", 5, 5)
    assert len(shown["attempts"]) == 1
    project.train("paused", "--until", "9")
    folder = project.runs / "paused" / "checkpoints" / "step-00000009"
    shard = next(p for p in sorted(folder.iterdir()) if p.name.startswith("shard"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    done = project.raydist("checkpoint", "verify", "paused")
    assert done.returncode == 3
    assert shard.name in done.stdout + done.stderr
    project.train("paused")
    (rejected,) = project.events("paused", "checkpoint_rejected")
    assert (rejected["step"], os.path.basename(rejected["file"])) == (9, shard.name)
    assert [e["step"] for e in project.events("paused", "resumed")] == [5, 6]
    assert_same(project, "paused", undisturbed)
    again = project.train("paused")
    assert (again["status"], len(again["attempts"])) == ("finished", 3)


@pytest.mark.parametrize("workers", [1, 3])
def test_another_world_size_trains_the_same_samples(project: Any, workers: int) -> None:
    """Trained on 2 to step 6, resumed on 1 and on 3: the samples of every step are the same, losses within 1e-4 relative
    (sums of float32 in another order). Without dropout, whose masks are drawn by each rank."""
    plain = ["--set", "model.dropout=0"]
    if not (project.runs / "two").exists():
        project.train("two", "--until", "6", *plain)
        shutil.copytree(project.runs / "two", project.runs / "two-whole")
        project.train("two-whole", *plain, *project.options("two"))
    name = f"two-then-{workers}"
    shutil.copytree(project.runs / "two", project.runs / name)
    project.train(name, *plain, *project.options("two"), "--set", f"cluster.workers={workers}")
    rows, expected = project.steps(name), project.steps("two-whole")
    assert [r["samples_hash"] for r in rows] == [r["samples_hash"] for r in expected]
    assert [r["tokens"] for r in rows] == [r["tokens"] for r in expected]
    assert [r["world_size"] for r in rows] == [2] * 6 + [workers] * 6
    for row, other in zip(rows, expected, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_a_second_ctrl_c_ends_at_once(project: Any) -> None:
    """SIGINT while a rank cannot come to the end of its step, and once more: the run ends there, with what was committed."""
    process = project.start("train", "job.yaml", "--name", "stuck", *project.options("stuck", hold=9))
    assert process.stderr is not None
    for line in process.stderr:
        if "checkpoint at step 3" in line:
            process.send_signal(signal.SIGINT)
        if "again to end at once" in line:
            process.send_signal(signal.SIGINT)
            break
    process.communicate(timeout=60)
    assert process.returncode == 130
    shown = project.show("stuck")
    assert (shown["status"], shown["checkpoints"][-1]["step"]) == ("interrupted", 3)


def test_a_bug_in_the_model_stops_with_its_own_traceback(project: Any) -> None:
    """The user's exception, raised on rank 1 three times with no progress: exit code 3, rank 1's cause, not the echo of rank
    0's lost connection."""
    done = project.raydist(
        "train", "job.yaml", "--name", "broken", "--set", "model.name=faulty:broken", "--set", "recovery.max_failures=9"
    )
    assert done.returncode == 3, done.stderr
    assert "rank 1: KeyError" in done.stderr
    assert "a bug in the user's model" in done.stderr
    assert "the same cause 3 times" in done.stderr
    assert "faulty.py" in done.stderr
    assert [f["rank"] for f in project.events("broken", "failure")] == [1, 1, 1]
    assert project.show("broken")["status"] == "stopped"


def test_what_build_raises_is_not_tried_again(project: Any) -> None:
    """zero3, and a build that cannot load its weights: one attempt, exit code 3, the user's error and where it was raised."""
    zero3 = ("--set", "parallel.strategy=zero3", "--set", "model.name=faulty:unloadable")
    done = project.raydist("train", "job.yaml", "--name", "unloadable", *zero3, "--set", "recovery.max_failures=9")
    assert done.returncode == 3, done.stderr
    assert 'Missing key(s) in state_dict: "weight"' in done.stderr
    assert "while the model was built: a restart would meet the same error" in done.stderr
    assert "in unloadable" in done.stderr
    assert [f["fault"] for f in project.events("unloadable", "failure")] == ["user_error"]
    assert [d["action"] for d in project.events("unloadable", "decision")] == ["stop"]


def test_what_cannot_work_is_refused_before_anything_starts(project: Any) -> None:
    """A name that the user's module lacks, and fp16 for workers without a GPU: exit code 2, one line, no run."""
    for wrong, told in (
        ("model.name=faulty:nosuch", 'unknown "faulty:nosuch": faulty has no "nosuch"; check the name after the colon'),
        ("precision=fp16", "precision: fp16 is not trained on CPUs"),
    ):
        done = project.raydist(
            "train", "job.yaml", "--name", "refused", "--set", wrong, "--set", "cluster.gpus_per_worker=0"
        )
        assert done.returncode == 2, done.stderr
        assert told in done.stderr
        assert len(without_stages(done.stderr).splitlines()) == 1, done.stderr
        assert not (project.runs / "refused").exists()


def test_other_numbers_are_refused(project: Any, undisturbed: dict[str, Any]) -> None:
    """Resuming with another learning rate is refused before anything starts, with the field, both values and the remedy."""
    done = project.raydist(
        "train", "job.yaml", "--name", "undisturbed", *project.options("undisturbed"), "--set", "optim.lr=0.5"
    )
    assert done.returncode == 2
    assert "optim.lr: was 0.01, is 0.5" in done.stderr
    assert "--allow-spec-change" in done.stderr


def test_a_run_that_is_alive_is_not_trained_twice(project: Any) -> None:
    """A second command for the same run is refused while the first one trains, with exit code 2."""
    command = ["train", "job.yaml", "--name", "twice", *project.options("twice"), "--set", "train.steps=100000"]
    first = project.start(*command)
    assert first.stderr is not None
    for line in first.stderr:
        if "step" in line:
            break
    second = project.raydist(*command)
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)
    assert second.returncode == 2, second.stderr
    assert "is being trained already" in second.stderr
    assert first.returncode == 143
    assert json.dumps(project.show("twice")["status"]) == '"interrupted"'
