"""How a rank executes a user's script: its arguments, its imports, and what is reported of its errors. No Ray, one process."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raydist.errors import TrainingStopped, UserError
from raydist.launch import script
from raydist.launch.rank_main import facts
from raydist.launch.script import Script
from raydist.worker.attempt import Outcome

DONE = Outcome("finished", 3, 0.5, None)


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a script changes of its process."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(script, "current", None)
    monkeypatch.chdir(tmp_path)


def run(path: Path, text: str, outcome: Outcome | None = DONE, *arguments: str) -> Outcome:
    """The outcome of a script whose session leaves `outcome`."""
    path.write_text(text)
    here: Any = SimpleNamespace(outcome=outcome)
    return Script(str(path), arguments, str(path.parent)).run(here)


def test_runs_as_python_does(tmp_path: Path) -> None:
    """It is `__main__`, gets its arguments, imports its neighbours, and may end with sys.exit()."""
    (tmp_path / "neighbour_of_a_script.py").write_text("WORD = 'hello'\n")
    text = (
        "import sys\nfrom pathlib import Path\nimport neighbour_of_a_script as n\n"
        "Path('seen').write_text(f'{__name__} {sys.argv[1:]} {n.WORD}')\nsys.exit()\n"
    )
    assert run(tmp_path / "train.py", text, DONE, "--lr", "3") is DONE
    assert (tmp_path / "seen").read_text() == "__main__ ['--lr', '3'] hello"


def test_a_script_without_a_session_is_one_clear_error(tmp_path: Path) -> None:
    """And so is one that hides the error of its session."""
    with pytest.raises(UserError, match=r"train.py: it ended without a session\s*open one in it"):
        run(tmp_path / "train.py", "x = 1\n", None)
    with pytest.raises(TrainingStopped, match="it has caught the error that ended its session"):
        run(tmp_path / "train.py", "x = 1\n", Outcome("stopped", 1, None, None))


def test_errors_name_the_scripts_line(tmp_path: Path) -> None:
    """The innermost one of the script itself; other exit codes than 0 are errors, too."""
    path = tmp_path / "train.py"
    with pytest.raises(ZeroDivisionError) as divided:
        run(path, "def inner():\n    return 1 / 0\n\ninner()\n")
    place = Script(str(path)).place(divided.value)
    assert place == "train.py, line 2"
    assert facts(divided.value, 1, place)["message"] == "train.py, line 2: division by zero"
    with pytest.raises(SystemExit) as ended:
        run(path, "import sys\nsys.exit(4)\n")
    assert "SystemExit: 4" in facts(ended.value, 0, Script(str(path)).place(ended.value))["message"]
