"""`raydist run`: a user's own loop on Ray workers, with what a job has. Without Ray: tests/own/test_session.py.

Over a minute: six runs in the warm driver, two in drivers of their own.
"""

from __future__ import annotations

import re
import signal
from typing import Any

import pytest

import raydist
from raydist.errors import TrainingStopped
from tests.end_to_end.test_memory import until_copied
from tests.exact import exact

ONLY_MEMORY = ("--set", "recovery.snapshot_every=5", "--set", "recovery.step_timeout=10")


def command(name: str, *arguments: str, options: tuple[str, ...] = ()) -> list[str]:
    """Of two workers."""
    return ["run", "loop.py", "--workers", "2", "--name", name, *options, "--", *arguments]


def test_a_killed_and_a_hanging_rank_change_no_bit(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL of rank 1, then it hangs, with no checkpoint but copies in memory: the verdict names its line, and records and
    weights are those of an undisturbed run, with one row a step. Then the same command has nothing to do, and --fresh begins
    again, from Python."""
    done = project.warm(*command("own-whole", "400", "sound"))
    assert done.returncode == 0, done.stderr
    marks = project.root / "marks" / "own-loop"
    marks.mkdir(parents=True)
    process = project.warm_start(*command("own-disturbed", "400", "killed", str(marks), options=ONLY_MEMORY))
    until_copied(process)
    (marks / "go").touch()
    _, told = process.communicate(timeout=300)
    assert process.returncode == 0, told
    died, hung = project.events("own-disturbed", "failure")
    assert (died["rank"], died["fault"], hung["rank"], hung["fault"]) == (1, "worker_died", 1, "worker_hung")
    assert "in step 350 " in hung["cause"]
    assert "/loop.py:" in hung["cause"]
    assert [e["source"] for e in project.events("own-disturbed", "resumed")] == ["memory"] * 2
    assert exact(project.steps("own-disturbed")) == exact(project.steps("own-whole"))
    assert project.weights("own-disturbed", 400) == project.weights("own-whole", 400)
    shown = project.show("own-disturbed")
    assert (shown["status"], shown["steps"], len(shown["attempts"])) == ("finished", 400, 3)
    assert project.warm(*command("own-whole", "400", "sound")).returncode == 0
    assert len(project.steps("own-whole")) == 400
    monkeypatch.chdir(project.root)
    run = raydist.run_script(
        "loop.py", [7, "sound"], workers=2, name="own-whole", storage=str(project.runs), fresh=True
    )
    assert (run.status, len(run.steps())) == ("finished", 7)


def test_the_users_errors_end_the_run(
    project: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 3, with the rank and the script's line; a rank that leaves its loop alone is named. From Python it is the exception
    of `run_script`, which also prints the address of the run's page."""
    done = project.warm(*command("own-bug", "10", "raises"))
    assert done.returncode == 3
    assert "rank 1: ValueError: loop.py, line " in done.stderr
    assert "a bug" in done.stderr
    assert "run own-bug stopped without a checkpoint: rank 1: " in done.stderr
    monkeypatch.chdir(project.root)
    monkeypatch.setenv("RAYDIST_STORAGE", str(project.runs))
    with pytest.raises(TrainingStopped, match="step 3: rank 1 left its loop, and the others did not"):
        raydist.run_script("loop.py", [10, "leaves"], workers=2, name="own-leaves", dashboard=True)
    assert re.search(r"http://127\.0\.0\.1:\d+/run/0/own-leaves\?token=[\w-]{43}\n", capsys.readouterr().err)


def test_stopped_with_a_checkpoint(project: Any) -> None:
    """Ctrl-C ends the loop on every rank after one step, with a checkpoint of it; the same command would go on there."""
    process = project.warm_start(*command("own-stopped", "1000000", "sound"))
    for line in process.stderr:
        if line.startswith("step "):
            break
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=240)
    assert process.returncode == 130, told
    shown = project.show("own-stopped")
    assert shown["status"] == "interrupted"
    assert shown["checkpoints"][-1]["step"] == shown["steps"] == len(project.steps("own-stopped"))
