"""What all tests share: quick ones first, one torch thread a process, nothing left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# A cluster of the developer's own must not be what the tests run on.
os.environ.pop("RAY_ADDRESS", None)

SLOW = ("observe/test_monitor_actor", "cluster", "faults", "cli/test_train", "end_to_end")
"""Files and folders that start Ray or groups of processes: they come last, in this order."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first, so that a mistake is known in seconds."""
    root = Path(__file__).parent

    def order(item: pytest.Item) -> int:
        name = item.path.relative_to(root).as_posix()
        return next((i + 1 for i, slow in enumerate(SLOW) if name.startswith(slow)), 0)

    items.sort(key=order)
