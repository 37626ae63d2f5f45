"""Sweep folders as a driver leaves them, for the tests of the code that reads them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from raydist.observe.run_monitor import RunMonitor
from raydist.records import Event, StepRecord
from raydist.run.directory import SPEC, RunDir
from raydist.run.sweep_directory import SweepDir, SweepLog
from raydist.spec import dump
from raydist.spec.sweep import Cell, Sweep, load_sweep, store

ROOT = Path(__file__).parents[3]


def train(
    run: RunDir,
    cell: Cell,
    losses: Sequence[float],
    eval_loss: float | None,
    status: str = "finished",
    noise: Sequence[float | None] = (),
) -> None:
    """Writes a run: one step per loss, of 100 tokens in 0.1 s, and an evaluation at the end."""
    run.storage.write(SPEC, dump(cell.job).encode())
    watch = RunMonitor(run.uri, interval_s=60.0)
    watch.begin_attempt(1, 2, 0)
    watch.push(
        [
            StepRecord(s, v, 1e-3, 1.0, 100, 0.1, 0.0, 2, 1, f"{s:016x}", noise[s - 1] if noise else None).to_dict()
            for s, v in enumerate(losses, start=1)
        ],
        [],
    )
    if eval_loss is not None:
        watch.push([], [Event("eval", time.time(), {"step": len(losses), "loss": eval_loss, "tokens": 64}).to_dict()])
    if status == "running":
        watch.flush()
        watch._store_state()
    else:
        watch.end(status)


class Swept:
    """A sweep in its folder, whose cells a test can end."""

    def __init__(self, folder: SweepDir, sweep: Sweep) -> None:
        self.folder, self.sweep, self.cells = folder, sweep, sweep.cells()
        store(folder, sweep, self.cells)
        self.log = SweepLog(folder)

    def start(self, cell: int, gpus: float = 2.0) -> None:
        self.log.event("started", self.cells[cell].id, workers=2, gpus=gpus)
        self.log.flush()

    def finish(self, cell: int, eval_loss: float | None, **figures: Any) -> None:
        """Ends a cell as a driver does: the figures are in the log, so its run is no longer read."""
        self.start(cell)
        told = {
            "steps": 100,
            "tokens": 12800,
            "loss": 3.0,
            "eval_loss": eval_loss,
            "tokens_per_second": 1000.0,
            **figures,
        }
        self.log.event("finished", self.cells[cell].id, figures=told)
        self.log.flush()

    def end(self, cell: int, kind: str, **data: Any) -> None:
        self.log.event(kind, self.cells[cell].id, **data)
        self.log.flush()


@pytest.fixture
def swept(tmp_path: Path) -> Callable[..., Swept]:
    """Makes a sweep of the quickstart from a file's text, or from a file in tune_sweeps/, in tmp_path/storage."""

    def make(text: str, name: str = "s") -> Swept:
        path = ROOT / "tune_sweeps" / text
        if not text.endswith(".yaml"):
            path = tmp_path / f"{name}.yaml"
            path.write_text(f"base: {ROOT / 'jobs/quickstart.yaml'}\n{text}")
        sweep = load_sweep(path)
        return Swept(SweepDir(tmp_path / "storage" / sweep.name), sweep)

    return make
