"""raydist.report.preparing: the progress of data preparation."""

from __future__ import annotations

import pytest
from rich.console import Console

from raydist.data.prepare import Progress
from raydist.report import preparing
from raydist.report.preparing import LINE_EVERY_S, data_progress


class Clock:
    """A clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def at(done: int, phase: str = "tokens") -> Progress:
    return Progress(phase, done << 20, 40 << 20, done * 10, done * 1000)


def test_elsewhere_sparse_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """The first report, one every few seconds, and the result, each on its own line."""
    clock, room = Clock(), []
    with data_progress(lambda: room.append(1), clock=clock) as report:
        assert capsys.readouterr().err == ""
        report(at(0, "tokenizer"))
        for done in range(1, 41):
            clock.now += LINE_EVERY_S / 20
            report(at(done))
    assert capsys.readouterr().err.splitlines() == [
        "training the tokenizer: 0 B of 40.0 MiB",
        "preparing the data: 20.0 MiB of 40.0 MiB, 20,000 tokens, 200 documents",
        "preparing the data: 40.0 MiB of 40.0 MiB, 40,000 tokens, 400 documents",
        "the data is prepared: 40,000 tokens, 400 documents",
    ]
    assert room == [1]


def test_what_is_there_already_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """If nothing has to be prepared, no line is written, and `before` is not called."""
    with data_progress(lambda: pytest.fail("nothing to show")):
        pass
    assert capsys.readouterr().err == ""


def test_on_a_terminal_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar has the bytes and the result, and is erased at the end; no Python object is shown."""
    terminal = lambda **_: Console(stderr=True, force_terminal=True, width=120)  # noqa: E731
    monkeypatch.setattr(preparing, "Console", terminal)
    with data_progress() as report:
        report(at(0))
        report(at(20))
    shown = capsys.readouterr().err
    assert "preparing the data" in shown
    assert "Progress(" not in shown
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") >= 0
