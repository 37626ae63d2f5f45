"""Fixtures that run the `raydist` command as a user does, in a folder of its own, and a check for processes that it leaves
behind."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from raydist.cli.main import app
from raydist.run.directory import RunDir
from tests import forked
from tests.end_to_end.driver import Warm, WarmCommand
from tests.exact import exact, weights
from tests.hosts import template_pids
from tests.leftovers import HELPERS
from tests.processes import command_line, runs

__all__ = ["Project", "exact"]

PROJECT = Path(__file__).parent / "project"
TIMEOUT_S = 240
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
OF_THE_WARM_RAY = ("ray::IDLE", "default_worker.py", "ray::_LeanController")
"""Idle workers, and workers that are starting: the warm driver's Ray keeps some. In two of three whole sessions a controller stayed
until that driver ended; why is not known. A command's own driver ends, and its Ray with it: tests of these see none."""


class Project:
    """A user's folder, with its job, its data and its runs.

    `start` and `raydist` run a command in a new process, with a private Ray if it needs one. `warm_start` and `warm` run it in
    the warm driver (driver.py), for tests that do not check how Ray starts or ends.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.runs = root, root / "runs"
        self._warm: Warm | None = None
        shutil.copytree(PROJECT, root, dirs_exist_ok=True)
        text = root / "text"
        text.mkdir()
        for i in range(40):
            (text / f"{i:02}.txt").write_text(f"document {i}: " + " ".join(str(i * j) for j in range(30 + i)))
        done = self.raydist("data", "prepare", "text", "--out", "data", "--eval-fraction", "0.2")
        assert done.returncode == 0, done.stderr

    def environment(self) -> dict[str, str]:
        """The environment of a user's shell; the storage is this folder's `runs`."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        return {**env, "RAYDIST_STORAGE": str(self.runs), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}

    def start(self, *arguments: str, env: dict[str, str] | None = None) -> forked.Program:
        """Starts the command in a new process, which is forked (tests/forked.py)."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return forked.Program(["raydist", *arguments], self.environment() | (env or {}), cwd=self.root, **pipes)

    def raydist(self, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Runs the command in a new process to its end."""
        return forked.run(["raydist", *arguments], self.environment() | (env or {}), cwd=self.root)

    def warm_start(self, *arguments: str) -> WarmCommand:
        """Starts the command in the warm driver; the first call starts the driver."""
        if self._warm is None:
            self._warm = Warm(self.root, self.environment())
        return self._warm.start(arguments)

    def warm(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs the command in the warm driver to its end."""
        process = self.warm_start(*arguments)
        out, err = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode is not None
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def close(self) -> None:
        """Ends the warm driver, if it was started."""
        if self._warm is not None:
            self._warm.close()
            self._warm = None

    def train(
        self,
        name: str,
        *arguments: str,
        kill: list[list[Any]] | None = None,
        hold: int | None = None,
        env: dict[str, str] | None = None,
        own_model: bool = True,
    ) -> dict[str, Any]:
        """Runs `raydist train job.yaml --name NAME --json`, in the warm driver, or with `env` in a new process; returns the
        object that it prints, which is all of stdout."""
        told = self.options(name, kill, hold) if own_model else []
        command = ["train", "job.yaml", "--name", name, "--json", *told, *arguments]
        done = self.warm(*command) if env is None else self.raydist(*command, env=env)
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr}"
        return dict(json.loads(done.stdout))

    def options(self, name: str, kill: list[list[Any]] | None = None, hold: int | None = None) -> list[str]:
        """The model's options: the ranks to kill and where, the pass in which to wait, and the folder for its marks."""
        marks = self.root / "marks" / name
        marks.mkdir(parents=True, exist_ok=True)
        return [
            "--set",
            f"model.options={json.dumps({'kill': kill or [], 'hold': hold, 'marks': str(marks), 'micro_batch': 2})}",
        ]

    def steps(self, name: str) -> list[dict[str, Any]]:
        """`raydist show NAME --steps --json`."""
        return [json.loads(line) for line in self._shown(name, "--steps").splitlines()]

    def show(self, name: str) -> dict[str, Any]:
        """`raydist show NAME --json`."""
        return dict(json.loads(self._shown(name)))

    def _shown(self, name: str, *options: str) -> str:
        """Runs in this process, because there are many calls; tests/end_to_end/test_package.py runs the command itself."""
        command = ["show", name, "--json", "--storage", str(self.runs), *options]
        done = CliRunner().invoke(app, command, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    def events(self, name: str, *kinds: str) -> list[dict[str, Any]]:
        """The run's events of these kinds; none given: all. Raises FileNotFoundError if it has not begun."""
        return [e for e in whole_lines(self.runs / name / "events.jsonl") if not kinds or e["kind"] in kinds]

    def weights(self, name: str, step: int) -> dict[str, bytes]:
        """Every tensor of a checkpoint, as from `tests.exact.weights`."""
        return weights(RunDir(self.runs / name), step)


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines that a process may be appending to: without a last line that is not whole."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


_PROJECTS: list[Project] = []


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """One user's folder for the session, with at most one warm driver; tests/faults uses the same."""
    if not _PROJECTS:
        _PROJECTS.append(Project(tmp_path_factory.mktemp("project")))
    yield _PROJECTS[0]
    _PROJECTS[0].close()


@pytest.fixture(scope="session")
def undisturbed(project: Project) -> dict[str, Any]:
    """A run of 12 steps on a private Ray, without a fault: its records, its weights, and the object that `raydist train` prints."""
    shown = project.train("undisturbed")
    assert shown["status"] == "finished"
    rows = project.steps("undisturbed")
    assert [r["step"] for r in rows] == list(range(1, 13))
    assert shown["loss"] == rows[-1]["loss"] < rows[0]["loss"]
    return {"rows": rows, "weights": project.weights("undisturbed", 12), "shown": shown}


@pytest.fixture(scope="module", autouse=True)
def nothing_left(ranks: Any) -> Iterator[None]:
    """At the end of a file, no process that its tests started is left, orphans included.

    The warm driver's own processes and Ray's idle workers may stay, but no actor and no rank of an ended run.
    """
    ranks.close()  # their threads would take CPU time from what is started here
    # Processes whose parent has died become children of this one instead of init's, so that all are counted.
    prctl = ctypes.CDLL(None).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    yield
    ranks.close()
    for warm in Warm.living:
        warm.settle()
    deadline = time.monotonic() + 240
    while alive := [name for pid, name in _children().items() if pid not in before | _that_stay() and name]:
        if all(any(mark in name for mark in OF_THE_WARM_RAY) for name in alive) and Warm.living:
            break
        assert time.monotonic() < deadline, alive
        time.sleep(0.2)  # they exit by themselves
    prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _children() -> dict[int, str]:
    """Running processes below this one, except its helpers: pid -> command line."""
    found = {p.pid: command_line(p) for p in psutil.Process().children(recursive=True) if runs(p)}
    return {pid: name for pid, name in found.items() if not any(helper in name for helper in HELPERS)}


def _that_stay() -> set[int]:
    return (template_pids() | forked.pids()).union(*(warm.own for warm in Warm.living))
