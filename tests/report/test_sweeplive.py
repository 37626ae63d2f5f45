"""The live display of a sweep: a table on a terminal, few plain lines elsewhere."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

from raydist.report.sweeplive import SweepConsole, cost_line, counts_line

COUNTS = {"running": 2, "waiting": 3, "finished": 1, "stopped": 0, "failed": 1}
SPENT: Any = SimpleNamespace(hours=0.5, gpu_hours=2.0, worker_hours=4.0)


def cell(name: str, step: int) -> Any:
    """A cell that trains; at step 0 it has not begun."""
    record = {"step": step, "loss": 2.5, "lr": 1e-3, "grad_norm": 1.0} if step else None
    rates = {"tokens_per_second": 1234.0, "seconds_per_step": 2.0} if step else {"tokens_per_second": None}
    state = "running" if step else "waiting for workers"
    return SimpleNamespace(
        id=name, state=state, total=40, workers=2, snapshot={"step": step, "record": record, **rates}
    )


class Terminal(io.StringIO):
    """What rich takes for one."""

    def isatty(self) -> bool:
        return True


def test_lines() -> None:
    """What is not there is left out; the cost only where there are GPUs and a price."""
    assert counts_line(COUNTS) == "2 running, 3 waiting, 1 finished, 1 failed"
    assert cost_line(SPENT, 2.5) == "30:00 on the wall, 4:00:00 of workers, 2.00 GPU-hours, cost 5.00"
    assert "cost" not in cost_line(SPENT, None)
    assert "GPU" not in cost_line(SimpleNamespace(hours=1.0, gpu_hours=0.0, worker_hours=1.0), 2.5)


def test_plain_lines_are_few() -> None:
    """The same counts again say nothing; new counts say one line more."""
    out = io.StringIO()
    with SweepConsole("grid", 2.5, out) as console:
        for _ in range(5):
            console.update([cell("lr1", 10), cell("lr2", 0)], COUNTS, SPENT)
        console.update([cell("lr2", 1)], {**COUNTS, "finished": 2, "running": 1}, SPENT)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("2 running, 3 waiting, 1 finished, 1 failed; 30:00 on the wall")
    assert lines[1] == "  lr1: running, step 10/40, loss 2.5000, tokens/s 1,234, ETA 1:00"
    assert lines[2] == "  lr2: waiting for workers, step 0/40"
    assert [line[:20] for line in lines[3:]] == ["1 running, 3 waiting"]


def test_table_on_a_terminal(monkeypatch: Any) -> None:
    """Every cell that trains has a row with its figures."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    out = Terminal()
    with SweepConsole("grid", None, out) as console:
        console.update([cell("lr1", 10), cell("lr2", 0)], COUNTS, SPENT)
    text = out.getvalue()
    for word in ("sweep grid", "3 waiting", "lr1", "10/40", "2.5000", "1,234", "1:00", "waiting for workers"):
        assert word in text
