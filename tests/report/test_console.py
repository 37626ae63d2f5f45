"""raydist.report.console: golden text of the panel and of the plain lines, and how often they are written."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as Rich

from raydist.records import Event
from raydist.report.console import LINE_EVERY_S, REFRESH_S, Console, panel
from raydist.report.text import line
from raydist.run.directory import RunDir


def snapshot(step: int = 120, **changes: Any) -> dict[str, Any]:
    record = {
        "step": step, "loss": 2.61234, "lr": 8.1e-4, "grad_norm": 0.9123, "tokens": 4096, "seconds": 0.5,
        "data_seconds": 0.002, "world_size": 2, "attempt": 2, "samples_hash": "0" * 16,
    }  # fmt: skip
    return {
        "status": "running", "attempt": 2, "world_size": 2, "workers": [], "step": step, "record": record,
        "eval": None, "eval_loss": 2.7011, "checkpoint": {"step": 100}, "tokens_per_second": 7431.4,
        "seconds_per_step": 1.15, "data_share": 0.004, "mfu": None, "attempts": 2, "failures": 1, "checkpoints": 2,
        "evals": 2, "command": None, "storage_error": None, "events": [], "next": 0, "stages": [], **changes,
    }  # fmt: skip


def drawn(what: Any) -> str:
    out = Rich(file=io.StringIO(), width=100, color_system=None)
    out.print(what)
    return out.file.getvalue()  # type: ignore[attr-defined]


PANEL = """\
╭─ quickstart · running · attempt 2 · 2 workers ───────────────────────────────────────────────────╮
│ step 120/200 ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━                                 60% │
│ loss 2.6123   eval 2.7011   lr 8.10e-04   grad norm 0.912   tokens/s 7,431   data wait 0.4%      │
│ ETA 1:32                                                                                         │
│ checkpoint at step 100   1 failed attempt                                                        │
╰─ /runs/quickstart ───────────────────────────────────────────────────────────────────────────────╯
"""

WAITING = """\
╭─ quickstart · running · attempt 1 · 2 workers ───────────────────────────────────────────────────╮
│ step 0                                                                                           │
│ waiting for the first step                                                                       │
│ no checkpoint yet                                                                                │
╰─ /runs/quickstart ───────────────────────────────────────────────────────────────────────────────╯
"""

TROUBLED = """\
╭─ quickstart · running · attempt 2 · 1 worker ────────────────────────────────────────────────────╮
│ step 120                                                                                         │
│ loss 2.6123   lr 8.10e-04   grad norm 0.912   tokens/s 7,431   MFU 41.3%   data wait 0.4%        │
│ checkpoint at step 100   stopping after a checkpoint   records wait for storage: disk full       │
╰─ /runs/quickstart ───────────────────────────────────────────────────────────────────────────────╯
"""


@pytest.mark.parametrize(
    ("shown", "total", "expected"),
    [
        (snapshot(), 200, PANEL),
        (
            snapshot(
                0, record=None, attempt=1, checkpoint=None, eval_loss=None, failures=0, tokens_per_second=None,
                seconds_per_step=None, data_share=None,
            ),
            None,
            WAITING,
        ),
        (snapshot(world_size=1, failures=0, eval_loss=None, mfu=0.4127, command="stop", storage_error="disk full"), None, TROUBLED),
    ],
)  # fmt: skip
def test_panel(shown: dict[str, Any], total: int | None, expected: str) -> None:
    """The panel on a terminal of 100 columns."""
    assert drawn(panel(shown, total, "quickstart", "/runs/quickstart")) == expected


def test_line() -> None:
    """The plain line has the same figures."""
    assert line(snapshot(mfu=0.4127), 200) == (
        "step 120/200  loss 2.6123  eval 2.7011  lr 8.10e-04  grad norm 0.912  tokens/s 7,431  MFU 41.3%  data wait 0.4%  ETA 1:32"
    )


class Clock:
    """A clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def steps(lines: list[str]) -> list[int]:
    return [int(told.split()[1].partition("/")[0]) for told in lines if told.startswith("step ")]


def test_piped_the_first_step_then_every_five_seconds_and_the_last(tmp_path: Path) -> None:
    """However often the monitor is asked, and also if lines are longer than the terminal's width."""
    stream, clock = io.StringIO(), Clock()
    with Console(200, RunDir(tmp_path / "quickstart"), stream=stream, clock=clock) as console:
        console.update(snapshot(0, record=None))
        for step in range(1, 41):
            clock.now = 100.0 + step * 0.5
            console.update(snapshot(step))
            console.update(snapshot(step))
    lines = stream.getvalue().splitlines()
    assert lines[0] == f"run quickstart: {tmp_path / 'quickstart'}"
    every = int(LINE_EVERY_S / 0.5)
    assert steps(lines) == [1, 1 + every, 1 + 2 * every, 1 + 3 * every, 40]
    assert len(lines) == 6


def test_piped_events_are_told_at_once(tmp_path: Path) -> None:
    """Events are not delayed by the line interval; a crash loop shows its traceback once; `workers` events are not shown."""
    stream = io.StringIO()
    failure = {"attempt": 1, "rank": 1, "cause": "boom", "fault": "raised", "traceback": "Traceback\n  boom\n"}
    with Console(200, RunDir(tmp_path / "quickstart"), stream=stream, clock=Clock()) as console:
        console.event(Event("workers", 1.0, {"workers": []}))
        console.event(Event("failure", 1.0, failure))
        console.event(Event("failure", 2.0, {**failure, "attempt": 2}))
        console.note("stopping [bold]now[/]")
        assert stream.getvalue().splitlines()[1:] == [
            "attempt 1 failed, rank 1: boom", "Traceback", "  boom", "attempt 2 failed, rank 1: boom",
            "(the same traceback)", "stopping [bold]now[/]",
        ]  # fmt: skip


def test_on_a_terminal_at_most_four_draws_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time limits the number of draws, not updates; the last state is drawn at the end; events are above the panel."""
    stream, clock = io.StringIO(), Clock()
    drawn: list[int] = []
    monkeypatch.setattr(
        "raydist.report.console.panel",
        lambda snapshot, *rest: drawn.append(snapshot["step"]) or f"<{snapshot['step']}>",
    )
    with Console(200, RunDir(tmp_path / "quickstart"), tty=True, stream=stream, clock=clock) as console:
        for step in range(1, 101):
            clock.now = 100.0 + step * REFRESH_S / 10
            console.update(snapshot(step))
        console.event(Event("note", 1.0, {"text": "[red]as it is"}))
    assert drawn[0] == 1
    assert drawn[-1] == 100
    assert len(drawn) <= 12
    assert "[red]as it is" in stream.getvalue()


def test_the_terminal_is_left_as_it_was(tmp_path: Path) -> None:
    """The cursor is shown again, also if the block ends with an error."""
    stream = io.StringIO()

    def train() -> None:
        with Console(200, RunDir(tmp_path / "quickstart"), tty=True, stream=stream) as console:
            console.update(snapshot())
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        train()
    assert stream.getvalue().rfind("\x1b[?25h") > stream.getvalue().rfind("\x1b[?25l") >= 0
