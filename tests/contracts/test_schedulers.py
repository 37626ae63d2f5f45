"""Every scheduler of sweeps keeps the contract in cluster/sweep/schedulers/__init__.py."""

from __future__ import annotations

from typing import Any

import pytest

from raydist import registry
from raydist.cluster.sweep.schedulers import GO, STOP, Copy, Decision, Rule, make, replay
from raydist.records import Event
from raydist.spec.sweep import Axis, SweepSpec

NAMES = registry.names("scheduler")
TOKENS, CELLS = 640, 12
AXES = [Axis("lr", "optim.lr", "log_uniform", low=1e-4, high=1e-2)]


def rule(scheduler: Any) -> Rule:
    """The rule of a sweep with trials of 640 tokens."""
    tree = {"base": "b.yaml", "array": {"parameters": [{"lr": [1e-3]}]}, "scheduler": scheduler}
    made = make(SweepSpec.model_validate(tree), AXES, TOKENS, lambda cell: {"optim.lr": 1e-3})
    assert made is not None
    return made


def reports() -> list[tuple[str, int, float]]:
    """Trials report every 32 tokens in turn; each loss falls, and is lower for a higher trial number."""
    return [
        (f"c{cell:02}", tokens, 10.0 - cell - tokens / TOKENS)
        for tokens in range(32, TOKENS, 32)
        for cell in range(CELLS)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_it_decides_by_its_calls_alone(name: str) -> None:
    """Two rules with the same calls decide the same, also if the second one replays the first half from the event log."""
    first = rule(name)
    decisions: list[Decision] = []
    events = []
    for cell, tokens, loss in reports():
        decisions.append(first.report(cell, tokens, -loss))
        events.append(Event("report", 0.0, {"cell": cell, "tokens": tokens, "value": loss}))
    half = len(events) // 2
    second = rule(name)
    replay(second, events[:half], "min")
    assert [second.report(c, t, -v) for c, t, v in reports()[half:]] == decisions[half:]


@pytest.mark.parametrize("name", NAMES)
def test_a_report_that_repeats_decides_nothing(name: str) -> None:
    """A trial that resumed from a checkpoint reports again: it continues."""
    made = rule(name)
    for cell, tokens, loss in reports():
        if made.report(cell, tokens, -loss) == GO:
            assert made.report(cell, tokens, -loss) == GO


@pytest.mark.parametrize("name", NAMES)
def test_the_best_cell_is_neither_stopped_nor_overwritten(name: str) -> None:
    """With reports in turn, and a non-finite loss from one trial; a copy is from another trial that has reported."""
    made, known = rule(name), set()
    for cell, tokens, loss in reports():
        known.add(cell)
        found = made.report(cell, tokens, float("-inf") if cell == "c00" else -loss)
        if cell == f"c{CELLS - 1:02}":
            assert found != STOP
            assert not isinstance(found, Copy)
        if isinstance(found, Copy):
            assert found.source in known - {cell}
            assert bool(registry.described("scheduler", name, "COPIES"))
        if found == STOP:
            made.over(cell)
