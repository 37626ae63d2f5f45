"""The command as a whole: it starts without heavy imports, and each error is one clear message with the right exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from raydist import errors
from raydist.cli import main as cli
from tests.stderr import without_stages

HEAVY = ("torch", "ray", "pyarrow", "numpy", "pydantic", "tensorboard", "pandas")


def test_help_is_light() -> None:
    """`raydist --help` imports none of the heavy libraries."""
    code = f"import sys; from raydist.cli.main import main\ntry: main(['--help'])\nfinally: print(sys.modules.keys() & {HEAVY!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "set()"
    for command in (
        "train",
        "submit",
        "sweep",
        "plan",
        "faults",
        "runs",
        "show",
        "stop",
        "logs",
        "rm",
        "sample",
        "schema",
        "data",
        "checkpoint",
        "convert",
        "report",
    ):
        assert f" {command} " in done.stdout


def test_only_the_command_that_is_called_is_made() -> None:
    """By its name: it has the parameters that it has beside all others. Any other first word gets the whole command line."""
    whole: Any = typer.main.get_command(cli.app)
    for name, command in whole.commands.items():
        (found,) = cli._command(name).commands.items()
        assert found[0] == name
        assert [(p.name, p.opts) for p in found[1].params] == [(p.name, p.opts) for p in command.params]
        assert [*getattr(found[1], "commands", {})] == [*getattr(command, "commands", {})]
    for first in ("", "--help", "trian"):
        assert [*cli._command(first).commands] == [*whole.commands]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.SpecError("a: b: c; d"), 2),
        (errors.WorkerFailed("rank 1 died", "look"), 3),
        (errors.StorageError("cannot write x"), 3),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_a_message_and_a_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    """Errors of raydist go to stderr unchanged, without a traceback; the exit code is the error's."""

    def fails(arguments: list[str] | None) -> None:
        raise error

    monkeypatch.setattr(cli, "_run", fails)
    with pytest.raises(SystemExit) as caught:
        cli.main(["train"])
    assert caught.value.code == code
    err = capsys.readouterr().err
    assert err.startswith("raydist: ")
    assert "Traceback" not in err


def test_an_exporter_s_option_is_checked_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`raydist train` with an option that the exporter does not have: one message, exit code 2, and nothing is created."""
    job = str(Path(__file__).parents[2] / "jobs" / "quickstart.yaml")
    chosen = "observe.exporters=[{name: prometheus, options: {prot: 3}}]"
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", job, "--storage", str(tmp_path / "runs"), "--set", chosen])
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert without_stages(told) == (
        'raydist: --set observe.exporters: observe.exporters[0].options.prot: unknown field; did you mean "port"?\n'
    )
    assert list(tmp_path.iterdir()) == []
