"""What rank 0 buffers while the run's monitor does not answer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from raydist.records import StepRecord
from raydist.worker.metrics import reporter
from raydist.worker.metrics.reporter import UNSENT, Reporter


def test_loads_that_wait_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond NUMBERS loads and biases older steps are sent without theirs; a checkpoint keeps none, and all steps arrive."""
    monkeypatch.setattr(reporter, "NUMBERS", 8)
    monkeypatch.setattr(reporter, "FLUSH_S", 0.5)
    answers, received = threading.Event(), list[dict[str, Any]]()

    def push(records: Sequence[dict[str, Any]], events: object) -> dict[str, Any]:
        if not answers.is_set():
            raise TimeoutError
        received.extend(records)
        return {}

    made = Reporter(push, lambda: None)
    loads = [[1, 2], [3, 4]]
    for step in range(1, 6):
        made.step(StepRecord(step, 3.0, 1e-3, 1.0, 10, 2.0, 0.1, 2, 1, "0" * 16, expert_loads=loads))
    assert not made._send()
    kept = made.before_commit(5)[UNSENT]["records"]
    assert {row["step"] for row in kept} == {1, 2, 3, 4, 5}
    assert all(row["expert_loads"] is None for row in kept)
    monkeypatch.setattr(reporter, "FLUSH_S", 240.0)
    answers.set()
    made.close()
    assert [row["step"] for row in received] == [1, 2, 3, 4, 5]
    assert [row["expert_loads"] for row in received] == [None, None, None, loads, loads]
