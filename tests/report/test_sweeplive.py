"""The live display of a sweep: a table on a terminal, few plain lines otherwise."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console as Rich

from raydist.records import Event
from raydist.report.sweep.standing import Standing
from raydist.report.sweeplive import SweepConsole, cost_line, counts_line
from raydist.run.sweep_directory import CellNote

COUNTS = {"running": 2, "waiting": 3, "finished": 1, "stopped": 0, "failed": 1}
SPENT: Any = SimpleNamespace(hours=0.5, gpu_hours=2.0, worker_hours=4.0)


def cell(name: str, step: int) -> Any:
    """A running cell; at step 0 it has not started."""
    record = {"step": step, "loss": 2.5, "lr": 1e-3, "grad_norm": 1.0} if step else None
    rates = {"tokens_per_second": 1234.0, "seconds_per_step": 2.0} if step else {"tokens_per_second": None}
    state = "running" if step else "waiting for workers"
    return SimpleNamespace(
        id=name, state=state, total=40, workers=2, snapshot={"step": step, "record": record, **rates}
    )


def standing(cells: int = 6, seeds: int = 1, mode: str = "min") -> Standing:
    """The state of a sweep over the learning rate: cell0, cell1, ..., none of which has ended."""
    made = Standing("eval_loss", mode)
    made.begin([CellNote(i, f"cell{i}", i // seeds, {"optim.lr": 0.5 + i // seeds}, i) for i in range(cells)], [])
    return made


def end(standing: Standing, number: int, value: float | None, kind: str = "finished", **data: Any) -> None:
    """A cell trained for 200 s, and has ended."""
    figures = {"steps": 40, "loss": 2.75, "eval_loss": value, "tokens_per_second": 1234.0}
    standing.add(Event("started", 100.0, {"cell": f"cell{number}", "workers": 2, "gpus": 0.0}))
    standing.add(Event(kind, 300.0, {"cell": f"cell{number}", "figures": figures, **data}))


class Terminal(io.StringIO):
    """A stream that rich takes for a terminal."""

    def isatty(self) -> bool:
        return True


def test_lines() -> None:
    """Missing values are left out; the cost is shown only with GPUs and a price."""
    assert counts_line(COUNTS) == "2 running, 3 waiting, 1 finished, 1 failed"
    assert cost_line(SPENT, 2.5) == "30:00 wall time, 4:00:00 worker time, 2.00 GPU-hours, cost 5.00"
    assert "cost" not in cost_line(SPENT, None)
    assert "GPU" not in cost_line(SimpleNamespace(hours=1.0, gpu_hours=0.0, worker_hours=1.0), 2.5)


def test_plain_lines_are_few() -> None:
    """Unchanged counts give no line; new counts give one."""
    out = io.StringIO()
    with SweepConsole("grid", 2.5, standing(), out) as console:
        for _ in range(5):
            console.update([cell("lr1", 10), cell("lr2", 0)], COUNTS, SPENT)
        console.update([cell("lr2", 1)], {**COUNTS, "finished": 2, "running": 1}, SPENT)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("2 running, 3 waiting, 1 finished, 1 failed; 30:00 wall time")
    assert lines[1] == "  lr1: running, step 10/40, loss 2.5000, tokens/s 1,234, ETA 1:00"
    assert lines[2] == "  lr2: waiting for workers, step 0/40"
    assert [line[:20] for line in lines[3:]] == ["1 running, 3 waiting"]


def test_table_on_a_terminal(monkeypatch: Any) -> None:
    """Every running cell has a row with its figures."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    out = Terminal()
    with SweepConsole("grid", None, standing(), out) as console:
        console.update([cell("lr1", 10), cell("lr2", 0)], COUNTS, SPENT)
    text = out.getvalue()
    for word in ("sweep grid", "3 waiting", "lr1", "10/40", "2.5000", "1,234", "1:00", "waiting for workers"):
        assert word in text


def test_a_line_for_each_cell_that_ends() -> None:
    """It has the objective, the time and the cause of a failure; a new best point has its own line. Cells that had ended before
    the start have no line."""
    out, known = io.StringIO(), standing()
    end(known, 0, 2.5)
    with SweepConsole("grid", None, known, out) as console:
        console.update([], COUNTS, SPENT)
        end(known, 1, 2.25)
        end(known, 2, 3.0, "stopped", because="asha: rung 1")
        end(known, 3, None, "failed", cause="KeyError: x\nand more", final=False)
        end(known, 3, None, "failed", cause="KeyError: x\nand more", final=True)
        console.update([], COUNTS, SPENT)
        console.update([], COUNTS, SPENT)
    assert out.getvalue().splitlines()[1:] == [
        "cell1: finished, eval_loss 2.2500, in 3:20",
        "cell2: stopped, eval_loss 3.0000, in 3:20: asha: rung 1",
        "cell3: failed, in 3:20: KeyError: x",
        "best so far: eval_loss 2.2500 with learning_rate 1.5",
    ]


@pytest.mark.parametrize(("running", "rows"), [(0, 5), (3, 8), (500, 19)])
def test_the_table_shows_what_is_over_and_fits(monkeypatch: Any, running: int, rows: int) -> None:
    """The five cells that ended last, the best of all, also if it is not among these, and at most 24 lines."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "24")
    out, known = Terminal(), standing(40)
    for number in range(40):
        end(known, number, 2.0 + abs(number - 7))
    with SweepConsole("grid", None, known, out) as console:
        console.update([cell(f"lr{i}", 10) for i in range(running)], COUNTS, SPENT)
        shown = io.StringIO()
        Rich(file=shown, width=100).print(console._live.get_renderable())  # type: ignore[union-attr]
    lines = shown.getvalue().splitlines()
    assert len(lines) <= 24
    assert lines[2].strip() == "best so far: eval_loss 2.0000 with learning_rate 7.5"
    assert sum(line.startswith(("lr", "cell3")) for line in lines) == rows
    assert [line.split()[0] for line in lines if line.startswith("cell3")] == [f"cell{i}" for i in range(39, 34, -1)]
    assert lines[rows + 3].split() == [
        "cell35",
        "finished",
        "40",
        "2.7500",
        "30.0000",
        "1,234",
        "in",
        "3:20",
    ]
    if running == 500:
        assert lines[-1].strip() == "and 486 more running"


def test_the_best_is_that_of_the_results() -> None:
    """The best is the mean over the finished seeds; another seed can change which point leads. With `max` it is the largest.
    Stopped cells and NaN do not count."""
    known = standing(4, seeds=2)
    assert known.best is None
    end(known, 2, 2.5)
    end(known, 0, 2.0)
    assert known.best is not None
    assert (known.best.parameters, known.best.value, known.best.seeds) == ({"optim.lr": 0.5}, 2.0, 1)
    end(known, 1, 4.0)
    assert (known.best.parameters, known.best.value, known.best.seeds) == ({"optim.lr": 1.5}, 2.5, 1)
    largest = standing(4, mode="max")
    end(largest, 0, 2.0)
    end(largest, 1, 3.0)
    end(largest, 2, 9.0, "stopped", because="x")
    end(largest, 3, float("nan"))
    assert largest.best is not None
    assert largest.best.value == 3.0


def test_the_best_under_pbt_has_the_values_that_it_took_on() -> None:
    """An exploited cell has other values than at its start."""
    known = standing()
    known.add(Event("exploited", 1.0, {"cell": "cell0", "source": "cell1", "changes": {"optim.lr": [0.5, 0.6]}}))
    end(known, 0, 2.0)
    assert known.best is not None
    assert known.best.parameters == {"optim.lr": 0.6}
