"""Kills, pauses and user errors, with the whole command: the bits of an undisturbed run, or one clear error.

Over a minute: eight runs, one of them with a Ray of its own.

The same bits for each strategy and other world sizes: tests/worker/test_exactness.py. A killed driver:
tests/faults/test_survived.py.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from tests.exact import exact
from tests.stderr import without_stages


def assert_same(project: Any, name: str, undisturbed: dict[str, Any]) -> None:
    """Records, weights, optimizer state and eval loss equal those of the undisturbed run, bit for bit, with one row a step."""
    assert exact(project.steps(name)) == exact(undisturbed["rows"])
    assert project.weights(name, 12) == undisturbed["weights"]
    shown = project.show(name)
    assert (shown["status"], shown["eval_loss"]) == ("finished", undisturbed["shown"]["eval_loss"])


def test_killed_ranks_and_saves_leave_no_trace(project: Any, undisturbed: dict[str, Any]) -> None:
    """SIGKILL of rank 1 while it saves step 6, of rank 0 while it saves step 9: one run with the same bits. There are more deaths
    than max_failures, with progress between them. Kills in other phases: tests/faults/test_survived.py.

    In a save rank 1 syncs one file, its shard; rank 0 also syncs the manifest, and in a restore one file that protects the
    checkpoint from deletion.
    """
    kill = [[1, "fsync", 2], [0, "fsync", 5]]
    shown = project.train("killed", "--set", "recovery.max_failures=1", kill=kill)
    assert len(list((project.root / "marks" / "killed").iterdir())) == len(kill)
    failures = project.events("killed", "failure")
    assert len(failures) == len(kill)
    assert [(f["rank"], f["fault"]) for f in failures] == [(rank, "worker_died") for rank, _, _ in kill]
    assert len(shown["attempts"]) == len(kill) + 1
    assert_same(project, "killed", undisturbed)


def test_paused_and_resumed_by_the_same_command(project: Any, undisturbed: dict[str, Any]) -> None:
    """--until 5 (between checkpoints) commits step 5 with status paused; the same command again does nothing. A byte of that
    checkpoint is flipped: verify names the file and exits with 3; without --until the run prints that it resumes from the
    checkpoint before, and ends with the same bits; a further command prints that the run is finished. Other strategies:
    tests/worker/test_exactness.py."""
    assert project.train("paused", "--until", "5")["status"] == "paused"
    shown = project.train("paused", "--until", "5")
    assert (shown["status"], shown["steps"], shown["checkpoints"][-1]["step"]) == ("paused", 5, 5)
    assert len(shown["attempts"]) == 1
    folder = project.runs / "paused" / "checkpoints" / "step-00000005"
    shard = next(p for p in sorted(folder.iterdir()) if p.name.startswith("shard"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    done = project.warm("checkpoint", "verify", "paused")
    assert done.returncode == 3
    assert shard.name in done.stdout + done.stderr
    project.train("paused")
    (rejected,) = project.events("paused", "checkpoint_rejected")
    assert (rejected["step"], os.path.basename(rejected["file"])) == (5, shard.name)
    assert [e["step"] for e in project.events("paused", "resumed")] == [3]
    assert_same(project, "paused", undisturbed)
    again = project.train("paused")
    assert (again["status"], len(again["attempts"])) == ("finished", 2)


def test_a_second_ctrl_c_ends_at_once(project: Any) -> None:
    """SIGINT while a rank cannot finish its step, then the terminal is gone (SIGHUP, and stderr cannot be written): the run ends at
    once, as after a second SIGINT, and keeps its last checkpoint."""
    process = project.start("train", "job.yaml", "--name", "stuck", *project.options("stuck", hold=9))
    assert process.stderr is not None
    assert process.stdout is not None
    for line in process.stderr:
        if "checkpoint at step 3" in line:
            process.send_signal(signal.SIGINT)
        if "again to end at once" in line:
            break
    process.stderr.close()
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=300) == 129
    process.stdout.close()
    shown = project.show("stuck")
    assert (shown["status"], shown["checkpoints"][-1]["step"]) == ("interrupted", 3)


def test_a_bug_in_the_model_stops_with_its_own_traceback(project: Any) -> None:
    """Rank 1 raises the user's exception three times without progress: exit code 3, and the cause is that exception, not rank 0's
    lost connection."""
    done = project.warm(
        "train", "job.yaml", "--name", "broken", "--set", "model.name=faulty:broken", "--set", "recovery.max_failures=9"
    )
    assert done.returncode == 3, done.stderr
    assert "rank 1: KeyError" in done.stderr
    assert "a bug in the user's model" in done.stderr
    assert "the same cause 3 times" in done.stderr
    assert "faulty.py" in done.stderr
    assert [f["rank"] for f in project.events("broken", "failure")] == [1, 1, 1]
    assert project.show("broken")["status"] == "stopped"


def test_an_error_of_build_is_not_tried_again(project: Any) -> None:
    """zero3, and a build that cannot load its weights: one attempt, exit code 3, the user's error and its line."""
    zero3 = ("--set", "parallel.strategy=zero3", "--set", "model.name=faulty:unloadable")
    done = project.warm("train", "job.yaml", "--name", "unloadable", *zero3, "--set", "recovery.max_failures=9")
    assert done.returncode == 3, done.stderr
    assert 'Missing key(s) in state_dict: "weight"' in done.stderr
    assert "while the model was built: a restart would meet the same error" in done.stderr
    assert "in unloadable" in done.stderr
    assert [f["fault"] for f in project.events("unloadable", "failure")] == ["user_error"]
    assert [d["action"] for d in project.events("unloadable", "decision")] == ["stop"]


def test_an_impossible_job_is_refused_before_anything_starts(project: Any) -> None:
    """A name that the user's module lacks, or fp16 for workers without a GPU: exit code 2, one line, no run."""
    for wrong, told in (
        ("model.name=faulty:nosuch", 'unknown "faulty:nosuch": faulty has no "nosuch"; check the name after the colon'),
        ("precision=fp16", "precision: fp16 needs GPUs"),
    ):
        done = project.warm(
            "train", "job.yaml", "--name", "refused", "--set", wrong, "--set", "cluster.gpus_per_worker=0"
        )
        assert done.returncode == 2, done.stderr
        assert told in done.stderr
        assert len(without_stages(done.stderr).splitlines()) == 1, done.stderr
        assert not (project.runs / "refused").exists()


def test_other_numbers_are_refused(project: Any, undisturbed: dict[str, Any]) -> None:
    """Resuming with another learning rate is refused before anything starts, with the field, both values and the remedy."""
    done = project.warm(
        "train", "job.yaml", "--name", "undisturbed", *project.options("undisturbed"), "--set", "optim.lr=0.5"
    )
    assert done.returncode == 2
    assert "optim.lr: was 0.01, is 0.5" in done.stderr
    assert "--allow-spec-change" in done.stderr


def test_a_run_that_is_alive_is_not_trained_twice(project: Any) -> None:
    """A second command for a run that is being trained is refused with exit code 2."""
    command = ["train", "job.yaml", "--name", "twice", *project.options("twice"), "--set", "train.steps=100000"]
    first = project.warm_start(*command)
    for line in first.stderr:
        if "step" in line:
            break
    second = project.raydist(*command)
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=300)
    assert second.returncode == 2, second.stderr
    assert "is being trained already" in second.stderr
    assert first.returncode == 143
    assert json.dumps(project.show("twice")["status"]) == '"interrupted"'
