"""`raydist init`: it writes the repository's own samples, complete and working."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from raydist.cli import init
from raydist.errors import UserError
from raydist.spec import load

ROOT = Path(__file__).parents[2]


def call(*arguments: str) -> list[str]:
    """Lines on stdout; its exceptions are not caught."""
    app = typer.Typer()
    app.command()(init.init)
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False).stdout.splitlines()


def test_the_repository_s_own_samples(tmp_path: Path) -> None:
    """Every job, sweep and dashboard is as in the repository, except for the schema's path, which exists; a second call writes
    nothing."""
    folder = tmp_path / "mine"
    told = call(str(folder))
    assert told[-1] == f"next: cd {folder} && raydist train jobs/quickstart.yaml"
    written = {path for path in folder.rglob("*") if path.is_file()}
    assert {Path(line) for line in told[:-1]} == written
    ours = [*ROOT.glob("jobs/*"), *ROOT.glob("tune_sweeps/*"), *ROOT.glob("deploy/grafana/*")]
    assert {path.relative_to(folder) for path in written if path.suffixes != [".schema", ".json"]} == {
        path.relative_to(ROOT / "deploy" if "deploy" in path.parts else ROOT) for path in ours
    }
    for path in sorted(folder.glob("*/*.yaml")):
        text = path.read_text()
        found = re.search(r"\$schema=(\S+)\n", text)
        assert found is not None
        assert (path.parent / found[1]).is_file()
        assert text.replace("../schemas/", "../docs/reference/") == (ROOT / path.relative_to(folder)).read_text()
    assert load(folder / "jobs/quickstart.yaml").name == "quickstart"
    (folder / "jobs/base.yaml").unlink()
    assert call(str(folder)) == [f"{folder}/jobs/base.yaml", told[-1]]
    assert call(str(folder)) == [told[-1]]


def test_a_file_of_the_user_s_own_is_kept(tmp_path: Path) -> None:
    """A file with other content is named in the error, and nothing is written."""
    mine = tmp_path / "tune_sweeps/pbt.yaml"
    mine.parent.mkdir()
    mine.write_text("mine: true\n")
    with pytest.raises(
        UserError, match=r"tune_sweeps/pbt.yaml exists and differs from the sample: nothing was written"
    ):
        call(str(tmp_path))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]
    assert mine.read_text() == "mine: true\n"
