"""What the tests of the monitor share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raydist.records import StepRecord
from raydist.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """The folder of a run, not there yet."""
    return RunDir(tmp_path / "a-run")


@pytest.fixture
def rows() -> Callable[..., list[dict[str, Any]]]:
    """Makes records of some steps of an attempt."""

    def make(steps: range, attempt: int = 1) -> list[dict[str, Any]]:
        return [StepRecord(s, 1 / s, 1e-3, 0.5, 100, 0.1, 0.01, 2, attempt, f"{s:016x}").to_dict() for s in steps]

    return make
