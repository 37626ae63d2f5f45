"""The progress of preparing a dataset: a bar on a terminal, a line every few seconds elsewhere. All output goes to stderr.

Runs in: the user's shell, or the driver. Must not import torch or ray.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from raydist.report import text

if TYPE_CHECKING:
    from raydist.data.prepare import Progress

LINE_EVERY_S = 5.0


@contextmanager
def data_progress(
    before: Callable[[], None] = lambda: None, at_once: bool = False, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[Progress], None]]:
    """Yields the function that `raydist.data.prepare` calls with its progress.

    Shows nothing before the first call, because the data may be prepared already, unless `at_once`. Calls `before()` first, which
    may clear the terminal.
    """
    console = Console(stderr=True)  # looks up sys.stderr for each write: a Ray session replaces it
    shown = _Bar(console) if console.is_terminal else _Lines(clock)
    if at_once:
        shown.begin()
    newest: Progress | None = None

    def report(at: Progress) -> None:
        nonlocal newest
        if newest is None:
            before()
        newest = at
        shown.begin()
        shown.update(at)

    try:
        yield report
    except BaseException:
        shown.end(None)
        raise
    shown.end(newest)


def _phase(at: Progress) -> str:
    return "training the tokenizer" if at.phase == "tokenizer" else "preparing the data"


def _count(at: Progress) -> str:
    return f"{at.tokens:,} tokens, {at.documents:,} documents" if at.tokens else ""


class _Bar:
    """A bar on a terminal, erased at the end."""

    def __init__(self, console: Console) -> None:
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TextColumn("{task.fields[count]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("reading the sources", total=None, count="")

    def begin(self) -> None:
        self._bar.start()  # a second call does nothing

    def update(self, at: Progress) -> None:
        self._bar.update(
            self._task, description=_phase(at), completed=at.bytes_done, total=at.bytes_total or None, count=_count(at)
        )

    def end(self, newest: Progress | None) -> None:
        self._bar.stop()


class _Lines:
    """Plain lines: the first report, one every LINE_EVERY_S, and the result."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._printed_at = clock, float("-inf")

    def begin(self) -> None:
        pass

    def update(self, at: Progress) -> None:
        if self._clock() - self._printed_at >= LINE_EVERY_S:
            self._printed_at = self._clock()
            share = f"{text.size(at.bytes_done)} of {text.size(at.bytes_total)}"
            print(": ".join((_phase(at), ", ".join(filter(None, (share, _count(at)))))), file=sys.stderr, flush=True)

    def end(self, newest: Progress | None) -> None:
        if newest is not None:
            print(f"the data is prepared: {_count(newest)}", file=sys.stderr, flush=True)
