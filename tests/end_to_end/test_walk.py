"""A new user's first day: the commands of README and docs/tutorials/first-day.md.

Over a minute: fifteen commands, three of which train.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests import forked

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def walk() -> ModuleType:
    """docs/walk.py as a module."""
    spec = importlib.util.spec_from_file_location("walk", ROOT / "docs/walk.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["walk"] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def commands(page: str) -> list[str]:
    """The commands between `<!-- walk -->` and `<!-- end -->`, without comments."""
    blocks = re.findall(r"<!-- walk -->\n(.*?)<!-- end -->", page, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("    ")]
    return [line.partition("  #")[0].strip() for line in lines]


def test_readme_s_commands_are_walked(walk: ModuleType) -> None:
    """Each command of README is in the walk, in the same order."""
    walked = [step.command for step in walk.WALK]
    told = commands((ROOT / "README.md").read_text())
    assert len(told) >= 8
    assert [command for command in walked if command in told] == told


def test_the_tutorial_is_of_this_walk(walk: ModuleType) -> None:
    """docs/tutorials/first-day.md has all commands of the script, and no path or address of the machine where it was written."""
    page = (ROOT / "docs/tutorials/first-day.md").read_text()
    assert re.findall(r"^## `(.*)`$", page, re.MULTILINE) == [step.command for step in walk.WALK]
    assert not re.search(r"/tmp/|/home/|/root/|raydist-walk-", page)


def test_what_a_reader_sees_of_an_output(walk: ModuleType) -> None:
    """The middle of a long output is left out, with the number of lines; of a progress bar only its last state is left; colours,
    control characters and this machine's paths are removed."""
    output = (
        "\x1b[1m/w/raydist/runs\x1b[0m\n" + "one\rtw\x00o\n" + "".join(f"{i}\n" for i in range(60)) + "x" * 200 + "\n"
    )
    told = walk.shown(output, Path("/w")).split("\n")
    assert told[:3] == ["~/raydist/runs", "tw\ufffdo", "0"]
    assert told[26] == "... 19 lines ..."
    assert told[-2:] == ["59", "x" * 147 + "..."]
    assert len(told) == 45


@pytest.mark.timeout(900)
def test_the_first_day(tmp_path: Path, walk: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command of the walk exits with 0 in a fresh clone, with tiny jobs; the page has the output of each. `make quickstart`
    runs the clone's code in its own virtual environment, and so does what only reads; what trains or plans after it is forked."""
    borrow, page = walk.borrow, tmp_path / "first-day.md"
    variables = [f"{name}={value}" for name, value in forked.environment().items()]
    program = shlex.join(["env", *variables, *forked.command("raydist")])

    def with_forks(venv: Path, there: Path) -> None:
        borrow(venv, there)
        command = there / ".venv" / "bin" / "raydist"
        whole = command.rename(command.with_name("whole"))
        command.write_text(
            "#!/bin/sh\n"
            "[ -e runs/quickstart/checkpoints ] || exec "
            f'{whole} "$@"\n'
            f'case "$1" in train|sample|plan|sweep) exec {program} "$@" ;; esac\n'
            f'exec {whole} "$@"\n'
        )
        command.chmod(0o755)

    monkeypatch.setattr(walk, "borrow", with_forks)
    monkeypatch.setattr(sys, "argv", ["walk.py", "--out", str(page), "--short", sys.prefix])
    walk.main()
    told = page.read_text()
    assert re.findall(r"^## `(.*)`$", told, re.MULTILINE) == [step.command for step in walk.WALK]
    passages = dict(re.findall(r"^## `([^\n]*)`$\n(.*?)(?=^## |\Z)", told, re.MULTILINE | re.DOTALL))
    for asked, expected in {
        "make quickstart": "run quickstart: finished at step 4",
        "raydist runs": "quickstart",
        "raydist train jobs/quickstart.yaml --set train.steps=400": "finished at step 400",
        "raydist sweep tune_sweeps/lr-batch.yaml --dry-run": "learning_rate",
        "raydist train jobs/python-10min.yaml": "run python-10min: finished at step 4",
    }.items():
        assert expected in passages[asked], passages[asked]
