"""A session fails if its tests leave something behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import leftovers

ROOT = Path(__file__).parents[1]
LEAVES = """
import socket, subprocess, tempfile
from pathlib import Path
kept = []
def test_leaves():
    listening = socket.create_server(("127.0.0.1", 0))
    kept.append(listening)
    sleeping = subprocess.Popen(["sleep", "600"], start_new_session=True)
    kept.append(sleeping)
    while not Path(f"/proc/{{sleeping.pid}}/environ").read_bytes():
        pass  # Popen returns before exec has written what a process is recognised by
    Path({shm!r}).write_text("")
    kept.append(tempfile.mkdtemp())
    Path("left").write_text(f"{{sleeping.pid}} {{listening.getsockname()[1]}} {{kept[-1]}}")
"""


@pytest.mark.parametrize("options", [[], ["-n", "1"]])
def test_a_session_that_leaves_something_fails(tmp_path: Path, options: list[str]) -> None:
    """All tests pass; the process, the port and the files are listed, and the exit code is 1. In one process and with xdist."""
    left = tmp_path / "shm" / "raydist-left"
    (tmp_path / "test_it.py").write_text(LEAVES.format(shm=str(left)))
    code, out = session(tmp_path, *options, wait_s=0.0)
    *numbers, temporary = (tmp_path / "left").read_text().split()
    pid, port = map(int, numbers)
    psutil.Process(pid).kill()
    assert code == 1, out
    assert "1 passed" in out
    assert f"process {pid}: sleep" in out
    assert f"port {port} of the tests' own process" in out
    assert f"file {left}" in out
    assert f"file {temporary}" in out
    assert not Path(temporary).parent.exists(), "the session's folder is deleted"


def test_a_session_that_leaves_nothing_passes(tmp_path: Path) -> None:
    """The session also passes with a file in shared memory that existed before, and a folder that goes when its process exits."""
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm" / "before").touch()
    (tmp_path / "test_it.py").write_text(
        "import tempfile\nfolder = tempfile.TemporaryDirectory()\ndef test_nothing():\n    pass\n"
    )
    code, out = session(tmp_path)
    assert code == 0, out
    assert "left behind" not in out


def session(folder: Path, *options: str, wait_s: float = leftovers.WITHIN_S) -> tuple[int, str]:
    """Runs pytest on that folder with the plugin, which waits so long for processes to exit: exit code and output."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.leftovers", "-p", "no:cacheprovider", "-c", os.devnull]
    (folder / "shm").mkdir(exist_ok=True)
    places = {"PYTHONPATH": str(ROOT), "RAYDIST_TEST_SHM": str(folder / "shm")}
    env = os.environ | places | {"RAYDIST_TEST_WAIT_S": str(wait_s)}
    done = subprocess.run(
        [*command, "--rootdir", str(folder), *options, "."], cwd=folder, env=env, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr
