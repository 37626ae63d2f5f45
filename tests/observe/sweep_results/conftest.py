"""Fixtures of the tests of rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raydist.observe.sweep_results import Row
from raydist.run.sweep_directory import SweepDir

FIGURES = {
    "steps": 40,
    "tokens": 5120,
    "loss": 2.5,
    "eval_loss": 2.25,
    "tokens_per_second": 9.0,
    "grad_noise_scale": None,
}


@pytest.fixture
def folder(tmp_path: Path) -> SweepDir:
    """The folder of a sweep; it does not exist yet."""
    return SweepDir(tmp_path / "a_sweep")


@pytest.fixture
def row() -> Callable[..., Row]:
    """make(cell, ...): a cell's row; by default the cell has finished."""

    def make(cell: str, lr: float = 1e-3, status: str = "finished", **other: Any) -> Row:
        told = {"cause": None, "seconds": 12.5, "figures": FIGURES, **other}
        parameters = {
            "optim.lr": lr,
            "optim.schedule": {"name": "wsd"},
            "train.compile": True,
            "parallel.strategy": "ddp",
        }
        return Row(cell, 3, 17, parameters, status, started=100.0, at=200.0, **told)

    return make
