"""A call of the Python API in a process of its own: its result or its error arrives; it ends with the process that waits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

import raydist
from raydist import errors
from raydist.api.call import Call, answer
from raydist.errors import RaydistError, RunNotFound, SpecError, TrainingStopped, UsageError
from tests.planted import imported, plant

FIND = "raydist.run.directory:resolve"


def test_every_error_arrives_with_its_class() -> None:
    """Name, message and hint are text; a class that the reader does not have becomes the base class."""
    kinds = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, RaydistError)]
    assert len(kinds) > 20
    for kind in kinds:
        result, found = answer(json.dumps({"error": [kind.__name__, "what \N{SNOWMAN}", "remedy"]}).encode())
        assert result is None
        assert type(found) is kind
        assert (found.message, found.hint) == ("what \N{SNOWMAN}", "remedy")
    for unknown in ("Unheard", "os"):
        assert type(answer(json.dumps({"error": [unknown, "a", "b"]}).encode())[1]) is RaydistError


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[1]", b"[" * 100_000, b"3", b"\xff", b'{"arguments": {}, "trusted": true}']
)
def test_what_is_no_answer_is_none(data: bytes) -> None:
    """Of a process that was killed, or wrote anything else."""
    assert answer(data) == (None, None)


def test_a_result(tmp_path: Path) -> None:
    """Plain values cross in both directions, more than a pipe holds. No process that the call starts has its descriptors. What
    trains there does not import the command line."""
    assert Call("json:loads", {"s": "[1, null]"}).wait() == [1, None]
    assert Call("textwrap:dedent", {"text": "\N{SNOWMAN}" * 300_000}).wait() == "\N{SNOWMAN}" * 300_000
    listed = {"args": ["ls", "/proc/self/fd"], "close_fds": False, "text": True}
    assert Call("subprocess:check_output", listed).wait().split() == ["0", "1", "2", "3"]
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, raydist.api.training, raydist.api.scripts, raydist.api.sweep_training\n"
        "sys.exit(any(name == 'typer' or name.startswith('raydist.cli') for name in sys.modules))\n"
    )
    Call("runpy:run_path", {"path_name": str(script)}).wait()


def test_a_call_imports_nothing_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a module of Python's, or an installed one."""
    plant(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert Call("json:loads", {"s": "[1]"}).wait() == [1]
    assert imported(tmp_path) == []


def test_numbers_of_numpy() -> None:
    """Cross as plain ones, inside lists and dicts, too, as paths do; another object is one clear error, before a process starts."""
    given = {"lr": np.float32(0.5), "steps": [np.int64(3), np.array(2)], "path": Path("a/b"), "on": np.bool_(True)}
    found = Call("json:dumps", {"obj": given}).wait()
    assert json.loads(found) == {"lr": 0.5, "steps": [3, 2], "path": "a/b", "on": True}
    for other in (object(), np.zeros(2)):
        with pytest.raises(UsageError, match=r"is not a value of a job\s*give numbers, texts"):
            Call("json:dumps", {"obj": other})


def test_what_comes_of_a_job_before_it_runs(tmp_path: Path) -> None:
    """`raydist.doctor` and `raydist.forecast` have what their commands print."""
    job = {"data": {"source": "text"}, "train": {"steps": 10}, "optim": {"lr": np.float32(1e-3)}}
    found = raydist.doctor(job, set={"cluster.workers": 2})
    assert set(found) == {"findings", "looked", "blind"}
    assert any("--gpus-per-node" in line for line in found["blind"])
    (tmp_path / "job.yaml").write_text(json.dumps({"data": {"source": "text"}, "train": {"steps": 10}}))
    array = {"parameters": {"learning_rate": [1e-3, 1e-2]}}
    (tmp_path / "sweep.yaml").write_text(json.dumps({"base": "job.yaml", "array": array}))
    cells = raydist.forecast(tmp_path / "sweep.yaml", storage=str(tmp_path), device="h100")["cells"]
    assert [cell["parameters"] for cell in cells] == [{"optim.lr": 1e-3}, {"optim.lr": 1e-2}]
    with pytest.raises(SpecError, match="optim.lrr"):
        raydist.doctor(job, set={"optim.lrr": 1})


def test_a_call_raises_its_own_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its message is on this process's stderr, too; one of a call that goes on alone is not. Secrets stay off the command line."""
    for tied in (True, False):
        call = Call(FIND, {"run": f"{tmp_path}/S3CRET", "storage": None}, tied=tied)
        assert b"S3CRET" not in Path(f"/proc/{call.pid}/cmdline").read_bytes()
        with pytest.raises(RunNotFound, match="no run"):
            call.wait()
        assert ("no run" in capfd.readouterr().err) is tied


@pytest.mark.parametrize("tied", [True, False])
def test_a_call_that_crashes(tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nobody expects arrives with its type, its message and the file with its traceback."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(RaydistError, match="an error of raydist itself: TypeError: the JSON object must be") as caught:
        Call("json:loads", {"s": 3}, tied=tied).wait()
    assert type(caught.value) is RaydistError
    log = Path(caught.value.hint.removeprefix("please report it, with "))
    assert log.is_relative_to(tmp_path)
    assert "Traceback" in log.read_text()


def test_a_killed_call() -> None:
    """It sends nothing: the error names the signal."""
    call = Call("signal:pause", {}, tied=False)
    os.kill(call.pid, signal.SIGKILL)
    with pytest.raises(TrainingStopped, match="SIGKILL"):
        call.wait()


@pytest.mark.parametrize("tied", [True, False])
def test_the_end_of_the_process_that_waits(tmp_path: Path, tied: bool) -> None:
    """SIGKILL of the process that waits for a call ends the call; one that is not waited for goes on."""
    script, go, done = tmp_path / "script.py", tmp_path / "go", tmp_path / "done"
    os.mkfifo(go)
    script.write_text(f"import sys; open({str(go)!r}).read(); open({str(done)!r}, 'w').close(); sys.exit()\n")
    waits = (
        f"from raydist.api.call import Call; c = Call('runpy:run_path', {{'path_name': {str(script)!r}}}, tied={tied}); "
        "print(c.pid, flush=True); c.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", waits], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
    if not tied:
        with go.open("w"):  # waits for the reader
            pass
    child.wait(240)
    assert done.exists() is not tied


def test_the_api_is_light() -> None:
    """`import raydist` and its functions need neither torch, ray nor pyarrow."""
    code = (
        "import sys, raydist; [getattr(raydist, name) for name in raydist.__all__]; "
        "sys.exit(', '.join(n for n in ('torch', 'ray', 'pyarrow', 'IPython', 'typer') if n in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        raydist.trian  # noqa: B018
