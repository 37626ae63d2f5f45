"""The live display of `raydist sweep`: a table of the cells that train on a terminal, plain lines elsewhere. All of it on stderr.

Runs in: the driver's main thread. Must not import torch or ray.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, TextIO

from rich.console import Console as Rich
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from raydist.report import text

LINE_EVERY_S = 10.0
REFRESH_S = 0.5
_ORDER = ("running", "waiting", "finished", "stopped", "failed")
_STYLES = {"failed": "red", "running": "bold"}


class Cell(Protocol):
    """A cell that trains: `raydist.cluster.sweep.cell.Live`."""

    id: str
    state: str
    total: int
    workers: int
    snapshot: dict[str, Any]


class Spent(Protocol):
    """Hours so far: `raydist.cluster.sweep.limits.Spent`."""

    @property
    def hours(self) -> float:
        """On the wall."""

    @property
    def gpu_hours(self) -> float:
        """Of GPUs."""

    @property
    def worker_hours(self) -> float:
        """Of workers."""


def counts_line(counts: Mapping[str, int]) -> str:
    """`3 running, 2 waiting, 4 finished`: what is not there is left out."""
    return ", ".join(f"{counts[name]} {name}" for name in _ORDER if counts.get(name))


def cost_line(spent: Spent, cost_per_gpu_hour: float | None) -> str:
    """What it has taken so far, and what that costs, where GPUs and a price are known."""
    said = [f"{_hours(spent.hours)} on the wall", f"{_hours(spent.worker_hours)} of workers"]
    if spent.gpu_hours:
        said.append(f"{spent.gpu_hours:.2f} GPU-hours")
        if cost_per_gpu_hour is not None:
            said.append(f"cost {spent.gpu_hours * cost_per_gpu_hour:.2f}")
    return ", ".join(said)


def _hours(hours: float) -> str:
    return text.span(hours * 3600)


def row(cell: Cell) -> tuple[str, str, str, str, str, str, str]:
    """Id, state, step, loss, tokens/s, ETA and workers of a cell, in words."""
    seen = cell.snapshot
    record = seen.get("record")
    shown = text.figures(seen, cell.total) if record else {}
    step = f"{seen['step']}/{cell.total}" if seen else ""
    loss = f"{record['loss']:.4f}" if record else ""
    pace = f"{seen['tokens_per_second']:,.0f}" if record and seen["tokens_per_second"] else ""
    return cell.id, cell.state, step, loss, pace, shown.get("ETA", ""), str(cell.workers)


def table(cells: Sequence[Cell], counts: Mapping[str, int], cost: str, name: str) -> RenderableType:
    """The whole display."""
    head = Text.assemble((f"sweep {name}", "bold"), "  ", counts_line(counts), "  ", (cost, "dim"))
    body = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("cell", "state", "step", "loss", "tokens/s", "ETA", "workers"):
        right = title in ("step", "loss", "tokens/s", "ETA", "workers")
        body.add_column(title, justify="right" if right else "left", no_wrap=True)
    for cell in cells:
        body.add_row(*map(Text, row(cell)))
    return Group(head, body)


class SweepConsole:
    """`with SweepConsole(name, cost_per_gpu_hour) as console:`; `update` and `note` may then be called from the main thread."""

    def __init__(self, name: str, cost_per_gpu_hour: float | None, stream: TextIO | None = None) -> None:
        self._name, self._price = name, cost_per_gpu_hour
        self._stream = stream or sys.stderr
        self._rich = Rich(file=self._stream)
        self._live: Live | None = None
        self._said, self._line = float("-inf"), ""

    def __enter__(self) -> SweepConsole:
        if self._rich.is_terminal:
            self._live = Live(console=self._rich, refresh_per_second=1 / REFRESH_S, redirect_stdout=False)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, live: Sequence[Cell], counts: Mapping[str, int], spent: Spent) -> None:
        """The cells that train, how many there are of each status, and what it has taken."""
        cost = cost_line(spent, self._price)
        if self._live is not None:
            self._live.update(table(live, counts, cost, self._name))
            return
        line, now = counts_line(counts), time.monotonic()
        due = now - self._said >= LINE_EVERY_S
        if line != self._line or due:
            self._line = line
            self.note(f"{line}; {cost}")
        if due:
            self._said = now
            for cell in live:
                name, state, step, loss, pace, eta, _ = row(cell)
                named = {"step": step, "loss": loss, "tokens/s": pace, "ETA": eta}
                told = [f"{label} {value}" for label, value in named.items() if value]
                self.note(f"  {name}: {', '.join([state, *told])}")

    def note(self, text: str) -> None:
        """A line of its own."""
        self._rich.print(Text(text), soft_wrap=True)
