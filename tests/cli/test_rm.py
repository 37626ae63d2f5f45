"""`raydist rm`: what it deletes and prints, and what it refuses before anything is deleted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from raydist.cli import rm
from raydist.errors import RunNotFound, UsageError
from raydist.run.directory import SPEC, RunDir
from raydist.run.lease import DriverLease
from raydist.run.sweep_directory import CellNote, SweepDir
from raydist.storage import Storage


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A storage with the runs a and b, and a sweep of one cell; links in run a point to a folder outside it."""
    home, outside = tmp_path / "home", tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("not the storage's")
    for name in ("a", "b"):
        run = RunDir(home / name)
        DriverLease(run).release()
        run.storage.write(SPEC, b'checkpoint: {replicas: ["/else\\e[31mwhere"]}\n')
        run.storage.write(
            "state.json", b'{"status": "finished", "heartbeat_at": 0, "driver": {"host": "h", "pid": 1}, "step": 3}'
        )
        run.storage.write("checkpoints/step-00000003/shard", b"x" * 3000)
    (home / "a" / "checkpoints" / "link").symlink_to(outside)
    (home / "a" / "link").symlink_to(outside)
    (home / "linked").symlink_to(home / "b")
    sweep = SweepDir(home / "s")
    sweep.write("", "", [CellNote(0, "c", 0, {}, 0)])
    sweep.run("c").storage.write(SPEC, b"")
    return home


def call(home: Path, *arguments: str) -> Any:
    """The result of the command; its exceptions are not caught."""
    app = typer.Typer()
    app.command()(rm.rm)
    return CliRunner().invoke(app, [*arguments, "--storage", str(home)], catch_exceptions=False)


def names(home: Path) -> list[str]:
    """Names in the storage."""
    return sorted(path.name for path in home.iterdir())


def test_runs_and_sweeps(home: Path, tmp_path: Path) -> None:
    """Each is shown with its size and deleted; targets of links stay, and copies elsewhere are named. A run given twice counts
    once."""
    done = call(home, "a", "s", str(home / "a"), "--yes")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0].startswith("run a (finished, step 0): 3.")
    assert lines[0].endswith(f"files: {home}/a")
    assert lines[1] == "  copies of its checkpoints in /elsewhere are kept"
    assert lines[2].startswith("sweep s (1 cells): ")
    assert lines[3:] == [f"deleted {home}/a", f"deleted {home}/s"]
    assert names(home) == ["b", "linked"]
    assert (tmp_path / "outside" / "kept").read_text() == "not the storage's"


def test_json(home: Path) -> None:
    """A list of the deleted runs; there is no question."""
    (told,) = json.loads(call(home, "b", "--yes", "--json").stdout)
    assert (told["name"], told["path"]) == ("b", f"{home}/b")
    assert told["bytes"] > 3000
    assert names(home) == ["a", "linked", "s"]
    with pytest.raises(UsageError, match="--json does not ask for confirmation"):
        call(home, "a", "--json")


def test_what_is_refused(home: Path) -> None:
    """No terminal and no --yes, a link, a folder that is not a run, a cell, an unknown name: exit code 2, and nothing is deleted,
    not even the valid names."""
    (home / "other").mkdir()
    before = names(home)
    for arguments, message in (
        (("a",), "cannot ask for confirmation"),
        (("a", "linked", "--yes"), "is a link to"),
        (("a", "other", "--yes"), "no run or sweep 'other'"),
        (("a", f"{home}/s/runs/c", "--yes"), "run c is a cell of sweep s"),
        (("a", "bb", "--yes"), "no run or sweep 'bb'"),
        (("a", "..", "--yes"), "no run or sweep '..'"),
    ):
        with pytest.raises((UsageError, RunNotFound), match=message) as caught:
            call(home, *arguments)
        assert caught.value.exit_code == 2
        assert names(home) == before


def test_a_running_one(home: Path) -> None:
    """A run or sweep whose driver is alive is refused; the error names the driver, and how to end it."""
    for name, kind in (("a", "run"), ("s", "sweep")):
        with (
            DriverLease(RunDir(home / name)),
            pytest.raises(UsageError, match=f"{kind} {name} is running, driven by process") as caught,
        ):
            call(home, name, "--yes")
        assert f"raydist stop {home}/{name}" in caught.value.hint
        assert (home / name).is_dir()


def test_the_question(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default answer is no; then nothing is deleted."""
    told: list[bool] = []
    monkeypatch.setattr(rm, "_confirmed", lambda count: told.append(True) or False)
    assert "nothing was deleted" in call(home, "a").stdout
    assert "a" in names(home)
    assert told == [True]


def test_on_an_object_store(s3: Any) -> None:
    """A run on an object store is deleted too."""
    home = Storage(s3.uri("removed"))
    run = RunDir(home.at("a"))
    run.storage.write(SPEC, b"")
    run.storage.write(
        "state.json", b'{"status": "finished", "heartbeat_at": 0, "driver": {"host": "h", "pid": 1}, "step": 3}'
    )
    app = typer.Typer()
    app.command()(rm.rm)
    done = CliRunner().invoke(app, ["a", "--yes", "--storage", home.full_uri], catch_exceptions=False)
    assert done.exit_code == 0
    assert not run.exists()
    assert home.folders() == []
