"""What `raydist run` refuses before anything is started. Its runs: tests/end_to_end/test_own_loop.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from raydist.cli.main import app
from raydist.errors import SpecError, UserError
from raydist.run.directory import SPEC, RunDir
from raydist.spec import parse, stored
from raydist.spec.script import SESSION, joined, launched

TREE: dict[str, Any] = {"data": {"path": "p"}, "train": {"steps": 4, "global_batch": 4, "micro_batch": 1}}


def refused(error: type[UserError], match: str, *arguments: str) -> None:
    """That command ends with that error."""
    with pytest.raises(error, match=match):
        CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def test_scripts_options_and_names(tmp_path: Path) -> None:
    """A missing or wrong script, a field that is the session's, a fault of raydist's loader, and the run of a job."""
    script, storage = tmp_path / "train.py", ("--storage", str(tmp_path / "runs"))
    refused(UserError, "train.py: No such file", "run", str(script), *storage)
    script.write_text("x = (\n")
    refused(UserError, "train.py: line 1: '\\(' was never closed", "run", str(script), *storage)
    refused(SpecError, "train.py: is a Python script; `raydist run .*train.py` trains with one", "train", str(script))
    job = tmp_path / "job.yaml"
    job.write_text("train: {steps: 3}\n")
    refused(UserError, r"job.yaml: is not a Python script\s*for a job: `raydist train", "run", str(job), *storage)
    script.write_text("x = 1\n")
    refused(
        SpecError, "--set train.steps: is not a field of a script's job",
        "run", str(script), *storage, "--set", "train.steps=3",
    )  # fmt: skip
    faults = tmp_path / "faults.yaml"
    faults.write_text("- {fault: stuck_data, rank: 0, step: 2}\n")
    refused(UserError, "stuck_data: is for raydist's own loader", "run", str(script), *storage, "--faults", str(faults))
    faults.write_text("- {fault: kill, rank: 2, step: 2}\n")
    refused(
        SpecError, "rank: 2: the job has ranks 0 to 1",
        "run", str(script), *storage, "--workers", "2", "--faults", str(faults),
    )  # fmt: skip
    RunDir(tmp_path / "runs" / "train").storage.write(SPEC, stored(parse(TREE)).encode())
    refused(UserError, "run train: a job made it, with model gpt", "run", str(script), *storage)


def test_train_refuses_a_scripts_run(tmp_path: Path) -> None:
    """Its spec.yaml has no model: the error says how to continue it."""
    spec = tmp_path / SPEC
    spec.write_text(stored(launched("own", {"workers": 2}, [], None)))
    refused(
        UserError, r"a script with a loop of its own made this run\s*continue it with that script", "train", str(spec)
    )


def test_the_job_of_a_session() -> None:
    """It has the session's arguments, and of the command its name, its workers and what `--set` may set."""
    before = parse({**TREE, "model": {"name": SESSION}, "checkpoint": {"every": 7}}, source="session")
    asked = launched("mine", {"workers": 3}, ["recovery.max_failures=9", "checkpoint.keep=5"], before)
    assert (asked.train.steps, asked.cluster.most, asked.recovery.on_oom) == (4, 3, "stop")
    made = joined(before, asked)
    assert (made.name, made.cluster.most, made.recovery.max_failures) == ("mine", 3, 9)
    assert (made.checkpoint.every, made.checkpoint.keep, made.train) == (7, 5, before.train)
    with pytest.raises(SpecError, match="^set train.steps: is not a field of a script's job"):
        launched("mine", {}, {"train.steps": 3}, before)
