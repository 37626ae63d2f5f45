"""The process of a command that the Python API starts: its error arrives with its class; it ends with the process that waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import raydist
from raydist import errors
from raydist.api.command import Command
from raydist.api.parent import VARIABLE, Parent, parsed
from raydist.errors import CheckpointNotFound, RaydistError, SpecError, TrainingStopped
from raydist.run.directory import SPEC, RunDir
from raydist.run.lease import DriverLease


def test_every_error_arrives_with_its_class() -> None:
    """Name, message and hint cross the pipe as text; a class that the reader does not have becomes the base class."""
    kinds = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, RaydistError)]
    assert len(kinds) > 20
    for kind in kinds:
        if kind is errors.RankFailed:
            continue  # plain data of a rank: it never ends a command
        read, write = os.pipe()
        Parent(write).tell(kind("what \N{SNOWMAN}", "remedy"))
        found = parsed(os.read(read, 1 << 16))
        os.close(read)
        os.close(write)
        assert type(found) is kind
        assert (found.message, found.hint) == ("what \N{SNOWMAN}", "remedy")
    assert type(parsed(b'["Unheard", "a", "b"]')) is RaydistError
    assert type(parsed(b'["os", "a", "b"]')) is RaydistError


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"[" * 100_000, b"3", b"\xff"])
def test_what_is_no_error_is_none(data: bytes) -> None:
    """A command that was killed, or wrote anything else."""
    assert parsed(data) is None


def test_the_variable_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process that the command starts inherits its descriptors; nonsense in the variable is no parent."""
    read, write = os.pipe()
    os.set_inheritable(write, True)
    monkeypatch.setenv(VARIABLE, f"{write},-1")
    Parent.take().tell(SpecError("a"))
    assert VARIABLE not in os.environ
    assert not os.get_inheritable(write)
    assert isinstance(parsed(os.read(read, 1000)), SpecError)
    for number in (read, write):
        os.close(number)
    for text in ("", "1", "a,b", "999999,-1"):
        monkeypatch.setenv(VARIABLE, text)
        Parent.take().tell(SpecError("b"))


def test_a_command_raises_its_own_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Exit codes 2 and 3 alike; its messages are on this process's stderr too."""
    RunDir(tmp_path / "a").storage.write(SPEC, b"name: a\n")
    command = Command(["checkpoint", "verify", str(tmp_path / "a"), "--step", "5"])
    with pytest.raises(CheckpointNotFound):
        command.wait()
    with pytest.raises(errors.RunNotFound, match="no run"):
        Command(["show", str(tmp_path / "b")]).wait()
    assert "no run" in capfd.readouterr().err


def test_a_killed_command(tmp_path: Path) -> None:
    """It sends nothing: the error names the signal."""
    command = Command(["watch", str(_empty(tmp_path))], tied=False)
    os.kill(command.pid, signal.SIGKILL)
    with pytest.raises(TrainingStopped, match="SIGKILL"):
        command.wait()


@pytest.mark.parametrize("tied", [True, False])
def test_the_end_of_the_process_that_waits(tmp_path: Path, tied: bool) -> None:
    """SIGKILL of the process that waits for a command ends the command; one that is not waited for goes on."""
    run = _empty(tmp_path)
    waits = (
        f"from raydist.api.command import Command; c = Command(['stop', {run.uri!r}], tied={tied}); "
        "print(c.pid, flush=True); c.wait()"
    )
    with DriverLease(run):  # of this process, and renewed: `raydist stop` waits for it
        parent = subprocess.Popen(
            [sys.executable, "-c", waits], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert parent.stdout is not None
        assert parent.stderr is not None
        child = psutil.Process(int(parent.stdout.readline()))
        deadline = time.monotonic() + 240
        while not _asked(tmp_path):  # it runs, and has its handlers
            assert time.monotonic() < deadline
            time.sleep(0.05)
        parent.kill()
        parent.communicate()
        if tied:
            child.wait(240)
        else:
            time.sleep(0.5)
            assert child.is_running()
            child.kill()


def _empty(folder: Path) -> RunDir:
    run = RunDir(folder / "run")
    run.storage.write(SPEC, b"name: run\n")
    return run


def _asked(folder: Path) -> bool:
    return any(name.endswith(".stop") for name in RunDir(folder / "run").storage.files("drivers"))


def test_the_api_is_light() -> None:
    """`import raydist` and its functions need neither torch, ray nor pyarrow."""
    code = (
        "import sys, raydist; raydist.train, raydist.open, raydist.sweep, raydist.Run; "
        "sys.exit(', '.join(n for n in ('torch', 'ray', 'pyarrow', 'IPython') if n in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        raydist.trian  # noqa: B018
