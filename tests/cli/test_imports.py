"""What a command imports: installed packages before the working directory, and a run's own code only where it is trusted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from raydist import registry
from raydist.cli.main import _trusted
from raydist.data.index import INDEX, DatasetIndex
from raydist.errors import ExtensionNotFound
from raydist.run.directory import SPEC, RunDir
from raydist.spec import parse

ROOT = Path(__file__).parents[2]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in that folder, as `python -m raydist`."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "raydist", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder whose modules leave a mark when they are imported: in the names of installed packages, and as a model's package."""
    source = "import pathlib\npathlib.Path(__file__).with_suffix('.mark').touch()\n"
    for name in ("pyarrow", "typer", "yaml", "rich", "own", "torch"):
        (tmp_path / f"{name}.py").write_text(source)
    run = RunDir(tmp_path / "foreign")
    job: dict[str, Any] = {
        "name": "foreign",
        "model": {"name": "own:Model"},
        "data": {"source": "x"},
        "train": {"steps": 1},
    }
    run.storage.write(SPEC, yaml.safe_dump(job).encode())
    return tmp_path


@pytest.mark.parametrize("arguments", [["show"], ["sample"], ["report"], ["checkpoint", "list"]], ids=" ".join)
def test_a_reading_command_runs_nothing_of_the_folder_or_the_run(planted: Path, arguments: list[str]) -> None:
    """Neither a module in the working directory nor the code that the run's spec names."""
    done = run(planted, *arguments, str(planted / "foreign"))
    assert "Traceback" not in done.stderr
    assert list(planted.glob("*.mark")) == []


def test_a_datasets_tokenizer_is_not_imported(planted: Path) -> None:
    """A dataset of somebody else names code as its tokenizer: `data show` refuses it, in the folder that holds that code."""
    (planted / "text.txt").write_text("hello " * 500)
    run(planted, "data", "prepare", "text.txt", "--out", "made").check_returncode()
    raw = json.loads((planted / "made" / INDEX).read_bytes())
    named = {**raw, "tokenizer": {**raw["tokenizer"], "name": "own:Tokenizer"}}
    (planted / "made" / INDEX).write_bytes(DatasetIndex.from_dict(named).to_bytes())
    done = run(planted, "data", "show", "made", "--document", "0")
    assert (done.returncode, "repeat the command with --trust" in done.stderr) == (2, True), done.stderr
    assert list(planted.glob("*.mark")) == []


def test_commands_that_only_read_are_not_trusted() -> None:
    """By their one or two words; a job of the user's own is not a run."""
    reading = [
        "profile",
        "evaluate",
        "data show",
        "data verify",
        "sweep results",
        "sweep best",
        "sweep report",
        "doctor",
    ]
    reading += ["doctor --storage y.yaml", "doctor --like=y.yaml", "doctor --set y.yaml --json", "doctor --nosuch.yaml"]
    assert [words for words in reading if _trusted([*words.split(), "x"])] == []
    assert not any(map(_trusted, (["doctor", "x", "--storage", "y.yaml"], ["doctor", "--like", "y.yaml"], ["doctor"])))
    trusted = (
        "data prepare x",
        "sweep x",
        "doctor x.yaml",
        "doctor --json x.yml",
        "doctor --storage y x.yaml",
        "show x --trust",
    )
    assert all(_trusted(words.split()) for words in trusted)


def test_a_job_imports_the_users_code_after_the_installed_packages(planted: Path) -> None:
    """`plan` looks into the module of a model of the user's; a file with the name of an installed package is not imported."""
    done = run(planted, "plan", str(planted / "foreign" / SPEC), "--json")
    assert "Traceback" not in done.stderr
    assert "no module" not in done.stderr
    assert [mark.name for mark in planted.glob("*.mark")] in ([], ["own.mark"])


def test_trust(monkeypatch: pytest.MonkeyPatch, planted: Path) -> None:
    """Without it the spec of a run with a model of its own is read, and the model is refused; with it, it is imported."""
    monkeypatch.chdir(planted)
    monkeypatch.syspath_prepend(str(planted))
    tree = yaml.safe_load((planted / "foreign" / SPEC).read_text())
    try:
        registry.trust(False)
        assert parse(tree).model.name == "own:Model"
        with pytest.raises(ExtensionNotFound, match="repeat the command with --trust|runs none of it"):
            registry.load("model", "own:Model")
        assert not (planted / "own.mark").exists()
        registry.trust(True)
        with pytest.raises(ExtensionNotFound):
            registry.load("model", "own:Nothing")
    finally:
        registry.trust(True)
        sys.modules.pop("own", None)
    assert json.dumps(tree)


def test_ctrl_c_during_the_imports_is_no_traceback(tmp_path: Path) -> None:
    """They take a fifth of a second, on a busy machine some seconds."""
    script = (
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'raydist.cli.main': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from raydist.__main__ import main\n"
        "main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")
