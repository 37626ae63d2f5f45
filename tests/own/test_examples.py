"""The scripts of examples/own, in this process: one rank each."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path
from typing import Any

import pytest

from raydist.run.directory import RunDir

ROOT = Path(__file__).parents[2]
NAMES = {"resnet": "resnet", "finetune": "bert", "train_gpt": "gpt"}
"""Script -> its run."""


def losses(path: Path, capsys: pytest.CaptureFixture[str]) -> list[float]:
    """That a script prints."""
    capsys.readouterr()
    runpy.run_path(str(path), run_name="__main__")
    return [float(line.split()[1]) for line in capsys.readouterr().out.splitlines() if line.startswith("loss")]


@pytest.mark.parametrize("name", NAMES)
def test_a_plain_script_and_its_session(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both learn in as many steps. The session's run is complete: once more, it trains nothing."""
    monkeypatch.setenv("RAYDIST_STORAGE", str(tmp_path))
    plain = losses(ROOT / f"examples/own/{name}_plain.py", capsys)
    session = losses(ROOT / f"examples/own/{name}.py", capsys)
    assert len(session) == len(plain) > 10
    for made in (plain, session):
        assert sum(made[-4:]) < sum(made[:4])
    run = RunDir(tmp_path / NAMES[name])
    assert run.newest_step() == len(session)
    assert losses(ROOT / f"examples/own/{name}.py", capsys) == []


@pytest.mark.parametrize("name", NAMES)
def test_few_lines_change(name: str) -> None:
    """Five lines are new; where the script sets the rate itself, that line, too."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    new = [line for line in generate.changes(name) if line.startswith("+")]
    assert len(new) == (6 if name == "train_gpt" else 5)
