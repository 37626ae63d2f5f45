"""Helpers for sweeps of a user's own models, and for the files that they leave."""

from __future__ import annotations

import inspect
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import yaml

from raydist.records import Event
from raydist.run.sweep_directory import SweepDir
from tests.end_to_end.conftest import Project, whole_lines
from tests.end_to_end.driver import WarmCommand
from tests.forked import Program

BASE = {
    "extends": "job.yaml",
    "cluster": {"workers": 1},
    "eval": {"every": 4, "batches": 1},
    "checkpoint": {"every": 4},
}
"""12 steps of 8 samples of 16 tokens, one worker."""


class Sweeps:
    """Sweeps in a user's folder."""

    def __init__(self, project: Project) -> None:
        self.project = project

    def write(
        self, name: str, cells: list[dict[str, Any]], concurrent: int, model: str = "cells:sound", **sections: Any
    ) -> None:
        """Writes NAME.yaml with these cells, or with parameters of another `array`, and creates the folder for its processes'
        files."""
        marks = self.marks(name)
        marks.mkdir(parents=True)
        base = {**BASE, "model": {"name": model, "options": {"marks": str(marks)}}}
        (self.project.root / f"{name}-base.yaml").write_text(yaml.safe_dump(base))
        array = {"type": "list", "parameters": cells, "concurrent": concurrent, **sections.pop("array", {})}
        told = {"base": f"{name}-base.yaml", "array": array, **sections}
        (self.project.root / f"{name}.yaml").write_text(yaml.safe_dump(told))

    def marks(self, name: str) -> Path:
        """The folder in which each process of its cells creates a file at its start."""
        return self.project.root / "marks" / name

    def folder(self, name: str) -> SweepDir:
        """The sweep's folder."""
        return SweepDir(self.project.runs / name)

    def cells(self, name: str) -> list[str]:
        """The cells' ids, in order."""
        return [cell.id for cell in self.folder(name).cells()]

    def events(self, name: str, cell: str, *kinds: str) -> list[Event]:
        """The cell's events of these kinds, from the sweep's log."""
        return [e for e in self.folder(name).events() if e.data.get("cell") == cell and e.kind in kinds]

    def run_events(self, name: str, cell: str, kind: str) -> list[dict[str, Any]]:
        """The cell's events of this kind, from its run's log; [] if the run has not started."""
        path = self.project.runs / name / "runs" / cell / "events.jsonl"
        return [e for e in whole_lines(path) if e["kind"] == kind] if path.exists() else []

    def losses(self, name: str, cell: str) -> list[float]:
        """The loss of every step of the cell."""
        return [row["loss"] for row in self.project.steps(str(self.folder(name).run(cell).uri))]

    def start(self, name: str, *options: str) -> Program:
        """Starts `raydist sweep NAME.yaml` in a new process with its own Ray."""
        return self.project.start("sweep", f"{name}.yaml", *options)

    def warm_start(self, name: str, *options: str) -> WarmCommand:
        """Starts it in the warm driver."""
        return self.project.warm_start("sweep", f"{name}.yaml", *options)

    def run(self, name: str) -> dict[str, Any]:
        """Runs it in the warm driver to its end; returns the object that it prints, which is all of stdout."""
        done = self.project.warm("sweep", f"{name}.yaml", "--json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))


def until(process: subprocess.Popen[str] | WarmCommand, true: Any) -> None:
    """Waits until the condition is true; fails if the process exits before, or after 240 s."""
    deadline = time.monotonic() + 240
    while not true():
        if process.poll() is not None:
            raise AssertionError(f"exit code {process.returncode}\n{process.communicate()[1]}")
        assert time.monotonic() < deadline, f"not in 240 s: {inspect.getsource(true)}"
        time.sleep(0.2)
