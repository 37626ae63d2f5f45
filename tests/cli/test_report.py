"""`raydist report`: where the page is written, and the output on stdout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from raydist.cli import report as command
from raydist.errors import RunNotFound, StorageError, UsageError
from raydist.report.goodput import PARTS
from raydist.report.run_metrics import report
from raydist.run.directory import RunDir
from tests.conftest import ObjectStore
from tests.report import story

DOCS = Path(__file__).parents[2] / "docs/how-to/report.md"
KEYS = [
    "run", "path", "status", "made_at", "steps", "total_steps", "global_batch", "loss", "eval_loss", "tokens_per_second",
    "samples_per_second", "mfu", "world_size", "versions", "started_at", "ended_at", "wall_seconds", "paused_seconds", "goodput",
    "parts", "attempts", "memory", "communication", "gradients", "experts", "slow", "incidents", "not_read", "report",
]  # fmt: skip


def call(*arguments: str) -> str:
    """Stdout of the command; its exceptions are not caught."""
    app = typer.Typer()
    app.command()(command.report)
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """The run of story.py."""
    return story.story(RunDir(tmp_path / "a-run"))


def test_the_page_goes_beside_the_run(run: RunDir, tmp_path: Path) -> None:
    """It is RUN/report.html, or the path of -o; a second one replaces it, and nothing else changes."""
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert call("a-run", "--storage", str(tmp_path)) == f"{run.uri}/report.html\n"
    page = Path(run.uri) / "report.html"
    first = page.read_bytes()
    assert first.startswith(b"<!doctype html>")
    call(run.uri)
    assert len(page.read_bytes()) == len(first)
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {*before, page}
    assert call(run.uri, "-o", f"{tmp_path}/new/b.html") == f"{tmp_path}/new/b.html\n"
    assert (tmp_path / "new" / "b.html").stat().st_size == len(first)


def test_a_name_alone_is_a_file_here(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is relative to the working directory, as for other commands."""
    monkeypatch.chdir(tmp_path)
    assert call(run.uri, "-o", "b.html") == f"{tmp_path}/b.html\n"
    assert (tmp_path / "b.html").exists()


def test_on_an_object_store(run: RunDir, s3: ObjectStore) -> None:
    """The page of a run there is written to the run; any run's page can be written to any URI."""
    there = story.story(RunDir(s3.uri("reported")))
    assert call(there.full_uri) == f"{there.storage.at('report.html').uri}\n"
    page = there.storage.read("report.html")
    assert page.startswith(b"<!doctype html>")
    assert b"secret" not in page
    call(run.uri, "-o", s3.uri("elsewhere/b.html"))
    assert RunDir(s3.uri("elsewhere")).storage.read("b.html").startswith(b"<!doctype html>")


def test_json_is_one_object(run: RunDir) -> None:
    """On one line, with exactly the documented keys; the page is written too."""
    told = call(run.uri, "--json")
    assert told.count("\n") == 1
    found = json.loads(told, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert list(found) == KEYS
    expected = json.loads(json.dumps(report(run).facts))
    assert {key: value for key, value in found.items() if key not in ("made_at", "report")} == {
        key: value for key, value in expected.items() if key != "made_at"
    }
    assert Path(found["report"]).exists()


def test_every_figure_is_documented() -> None:
    """docs/how-to/report.md has a line for each key, and for each part of the time."""
    lines = [line.split("|")[1] for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    named = {name for line in lines for name in re.findall(r"`(\w+)`", line)}
    assert named == {*KEYS, *PARTS}


def test_what_cannot_be_done(run: RunDir, tmp_path: Path) -> None:
    """A missing run, and a page path that is a folder, a FIFO or below a file: each is an error."""
    with pytest.raises(RunNotFound, match="a-run") as caught:
        call("another", "--storage", str(tmp_path))
    assert caught.value.exit_code == 2
    for out in (str(tmp_path), f"{tmp_path}/"):
        with pytest.raises(UsageError, match="is a folder"):
            call(run.uri, "-o", out)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match="fifo is not a regular file"):
        call(run.uri, "-o", str(tmp_path / "fifo"))
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot write .*/file/b\.html"):
        call(run.uri, "-o", f"{tmp_path}/file/b.html")


def test_report_loads_neither_ray_nor_torch(run: RunDir) -> None:
    """The command needs no cluster: neither library is imported."""
    script = (
        "import sys, typer; from raydist.cli import report; app = typer.Typer(); app.command()(report.report)\n"
        "app([sys.argv[1]], standalone_mode=False)\n"
        "print(sorted({n.partition('.')[0] for n in sys.modules} & {'ray', 'torch', 'tensorboard'}))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    told = subprocess.run([sys.executable, "-c", script, run.uri], capture_output=True, text=True, check=True, env=env)
    assert told.stdout.splitlines()[-1] == "[]"
