"""The `raydist` command as a user runs it, in a folder of the user's own, and a look at what it leaves behind."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from raydist.cli.main import app
from tests.processes import command_line

PROJECT = Path(__file__).parent / "project"
RAYDIST = str(Path(sys.executable).with_name("raydist"))
TIMEOUT_S = 240
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
EXACT = ("step", "loss", "lr", "grad_norm", "tokens", "samples_hash")
"""What neither a restart nor another place may change. Seconds and attempts differ, of course."""


def exact(rows: list[dict[str, Any]]) -> list[list[Any]]:
    """The part of the records that must be equal bit for bit."""
    return [[row[name] for name in EXACT] for row in rows]


class Project:
    """A user's folder, with its job, its data and its runs."""

    def __init__(self, root: Path) -> None:
        self.root, self.runs = root, root / "runs"
        shutil.copytree(PROJECT, root, dirs_exist_ok=True)
        text = root / "text"
        text.mkdir()
        for i in range(40):
            (text / f"{i:02}.txt").write_text(f"document {i}: " + " ".join(str(i * j) for j in range(30 + i)))
        done = self.raydist("data", "prepare", "text", "--out", "data", "--eval-fraction", "0.2")
        assert done.returncode == 0, done.stderr

    def environment(self) -> dict[str, str]:
        """What a user's shell would have; the storage is the folder's own."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        return {**env, "RAYDIST_STORAGE": str(self.runs), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}

    def start(self, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """The command, running."""
        return subprocess.Popen(
            [RAYDIST, *arguments],
            cwd=self.root, env=self.environment() | (env or {}), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def raydist(self, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """The command, done."""
        process = self.start(*arguments, env=env)
        out, err = process.communicate(timeout=TIMEOUT_S)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def train(
        self,
        name: str,
        *arguments: str,
        kill: list[list[Any]] | None = None,
        hold: int | None = None,
        env: dict[str, str] | None = None,
        own_model: bool = True,
    ) -> dict[str, Any]:
        """`raydist train job.yaml --name NAME --json`: the object that it ends with, alone on stdout."""
        told = self.options(name, kill, hold) if own_model else []
        done = self.raydist("train", "job.yaml", "--name", name, "--json", *told, *arguments, env=env)
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr}"
        return dict(json.loads(done.stdout))

    def options(self, name: str, kill: list[list[Any]] | None = None, hold: int | None = None) -> list[str]:
        """What the model is told: whom to kill, where to wait, and where to note that it has."""
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
        """Asked in this process, for it is asked often; tests/end_to_end/test_ways_in.py has the command's own."""
        command = ["show", name, "--json", "--storage", str(self.runs), *options]
        done = CliRunner().invoke(app, command, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        """The events of one kind."""
        lines = (self.runs / name / "events.jsonl").read_text().splitlines()
        return [e for e in map(json.loads, lines) if e["kind"] == kind]

    def weights(self, name: str, step: int) -> dict[str, bytes]:
        """Every tensor of a checkpoint, optimizer state and all, as bytes; random states left out."""
        from raydist.checkpoint import manifest
        from raydist.run.directory import RunDir

        run = RunDir(self.runs / name)
        found = manifest.read(run, step)
        tensors = {}
        for tensor, entry in found.tensors.items():
            if tensor.startswith(("model/", "optim/")):
                parts = []
                for chunk in sorted(entry.chunks, key=lambda c: c.offsets):
                    with run.storage.open(manifest.path(step, chunk.file)) as source:
                        source.seek(chunk.start)
                        parts.append(source.read(chunk.length))
                tensors[tensor] = b"".join(parts)
        return tensors


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """One user's folder for the session."""
    return Project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="session")
def undisturbed(project: Project) -> dict[str, Any]:
    """A run of 12 steps on a private Ray, in which nothing happens: its records, weights, and what `raydist train` ends with."""
    shown = project.train("undisturbed")
    assert shown["status"] == "finished"
    rows = project.steps("undisturbed")
    assert [r["step"] for r in rows] == list(range(1, 13))
    assert shown["loss"] == rows[-1]["loss"] < rows[0]["loss"]
    return {"rows": rows, "weights": project.weights("undisturbed", 12), "shown": shown}


@pytest.fixture(scope="module", autouse=True)
def nothing_left(ranks: Any) -> Iterator[None]:
    """At the end of a file nothing is left of what was started for its tests, orphans included."""
    ranks.close()  # their threads would take a part of what is started here
    resource_tracker.ensure_running()  # multiprocessing's, which stays for the whole session
    # Processes whose parent has died become ours instead of init's, so that none escapes the count.
    prctl = ctypes.CDLL(None).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    yield
    ranks.close()
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    names = {process.pid: command_line(process) for process in left}
    _, alive = psutil.wait_procs(left, timeout=20)
    prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    assert not alive, [names.get(p.pid) for p in alive]
