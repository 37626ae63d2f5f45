"""The live display of `raydist sweep`: the running cells, those that ended last and the best so far, as a table on a terminal
and as plain lines elsewhere. All output goes to stderr.

Runs in: the driver's main thread. Must not import torch or ray.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.console import Console as Rich
from rich.console import Group, RenderableType
from rich.live import Live as Display
from rich.table import Table
from rich.text import Text

from raydist.report import text
from raydist.report.sweep.conclusions import measured, named
from raydist.report.sweep.standing import Leader, Live, Over, Spent, Standing

LINE_EVERY_S = 10.0
REFRESH_S = 0.5
_ORDER = ("running", "waiting", "finished", "stopped", "failed")
_ENDED = 5
"""Number of ended cells in the table."""
_STYLES = {"failed": "red", "finished": "green"}


def counts_line(counts: Mapping[str, int]) -> str:
    """`3 running, 2 waiting, 4 finished`: zero counts are left out."""
    return ", ".join(f"{counts[name]} {name}" for name in _ORDER if counts.get(name))


def cost_line(spent: Spent, cost_per_gpu_hour: float | None) -> str:
    """The time used so far, and its cost if GPUs and a price are known."""
    parts = [f"{_hours(spent.hours)} wall time", f"{_hours(spent.worker_hours)} worker time"]
    if spent.gpu_hours:
        parts.append(f"{spent.gpu_hours:.2f} GPU-hours")
        if cost_per_gpu_hour is not None:
            parts.append(f"cost {spent.gpu_hours * cost_per_gpu_hour:.2f}")
    return ", ".join(parts)


def _hours(hours: float) -> str:
    return text.span(hours * 3600)


_TITLES = ("cell", "state", "step", "loss", "eval loss", "tokens/s", "ETA", "workers")


def row(cell: Live) -> tuple[str, ...]:
    """A running cell as text, one entry for each of _TITLES."""
    snapshot = cell.snapshot
    record = snapshot.get("record")
    shown = text.figures(snapshot, cell.total) if record else {}
    step = f"{snapshot['step']}/{cell.total}" if snapshot else ""
    loss = f"{record['loss']:.4f}" if record else ""
    pace = f"{snapshot['tokens_per_second']:,.0f}" if record and snapshot["tokens_per_second"] else ""
    return cell.id, cell.state, step, loss, shown.get("eval", ""), pace, shown.get("ETA", ""), str(cell.workers)


def over_row(one: Over) -> tuple[str, ...]:
    """The same for a cell that has ended, with its duration in place of the remaining time."""
    step = "" if one.steps is None else str(one.steps)
    loss = "" if one.loss is None else text.loss(one.loss)
    held_out = "" if one.eval_loss is None else text.loss(one.eval_loss)
    pace = text.rate(one.tokens_per_second) if one.tokens_per_second else ""
    took = "" if one.seconds is None else f"in {text.span(one.seconds)}"
    return one.cell, one.status, step, loss, held_out, pace, took, ""


def best_line(metric: str, best: Leader | None) -> str:
    """`best so far: eval_loss 2.0245 with learning_rate 0.001`; empty before a cell has finished."""
    if best is None:
        return ""
    seeds = f", mean of {best.seeds} seeds" if best.seeds > 1 else ""
    return f"best so far: {metric} {measured(best.value)} with {named(best.parameters)}{seeds}"


def over_line(metric: str, one: Over) -> str:
    """`CELL: finished, eval_loss 2.0245, in 3:20`; with the cause if it failed or was stopped."""
    parts = [one.status]
    if one.value is not None:
        parts.append(f"{metric} {measured(one.value)}")
    if one.seconds is not None:
        parts.append(f"in {text.span(one.seconds)}")
    why = f": {one.cause.splitlines()[0]}" if one.cause and one.status != "finished" else ""
    return f"{one.cell}: {', '.join(parts)}{why}"


def table(
    cells: Sequence[Live],
    counts: Mapping[str, int],
    cost: str,
    name: str,
    standing: Standing,
    height: int = 24,
) -> RenderableType:
    """The whole display, at most `height` lines: the running cells, those that ended last, and the best point so far."""
    head = Text.assemble((f"sweep {name}", "bold"), "  ", counts_line(counts), no_wrap=True, overflow="ellipsis")
    best = best_line(standing.metric, standing.best)
    rest = max(
        2, height - 5
    )  # minus the two lines at the top, the line of the best, the titles, and the line for omitted cells
    ended = standing.last(min(_ENDED, rest // 2))
    shown = cells[: rest - len(ended)]
    body = Table(box=None, pad_edge=False, header_style="dim")
    titles = _TITLES if len({cell.workers for cell in shown}) > 1 else _TITLES[:-1]
    for title in titles:
        words = title in ("cell", "state")  # these are shortened on a narrow terminal, figures are not
        body.add_column(title, justify="left" if words else "right", no_wrap=not words)
    for cell in shown:
        body.add_row(*map(_short, row(cell)[: len(titles)]))
    for one in ended:
        style = _STYLES.get(one.status, "dim")
        body.add_row(*map(_short, over_row(one)[: len(titles)]), style=style)
    left_out = len(cells) - len(shown)
    return Group(
        head,
        Text(cost, "dim", no_wrap=True, overflow="ellipsis"),
        *([Text(best, "green", no_wrap=True, overflow="ellipsis")] if best else []),
        body,
        *([Text(f"and {left_out:,} more running", "dim")] if left_out else []),
    )


def _short(words: str) -> Text:
    """On one line, shortened to the available width."""
    return Text(words, no_wrap=True, overflow="ellipsis")


class SweepConsole:
    """`with SweepConsole(name, cost_per_gpu_hour, standing) as console:`; `update` and `note` may then be called from the main
    thread. The caller passes the sweep's events to `standing`.
    """

    def __init__(
        self, name: str, cost_per_gpu_hour: float | None, standing: Standing, stream: TextIO | None = None
    ) -> None:
        self._name, self._price, self._standing = name, cost_per_gpu_hour, standing
        self._stream = stream or sys.stderr
        self._rich = Rich(file=self._stream)
        self._live: Display | None = None
        self._printed_at, self._line = float("-inf"), ""
        self._over, self._best = standing.since(0)[0], standing.best

    def __enter__(self) -> SweepConsole:
        if self._rich.is_terminal:
            self._live = Display(console=self._rich, refresh_per_second=1 / REFRESH_S, redirect_stdout=False)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, live: Sequence[Live], counts: Mapping[str, int], spent: Spent) -> None:
        """Shows the running cells, the number of cells of each status, and the time used."""
        cost = cost_line(spent, self._price)
        if self._live is not None:
            self._live.update(table(live, counts, cost, self._name, self._standing, self._rich.size.height))
            return
        self._ended()
        line, now = counts_line(counts), time.monotonic()
        due = now - self._printed_at >= LINE_EVERY_S
        if line != self._line or due:
            self._line = line
            self.note(f"{line}; {cost}")
        if due:
            self._printed_at = now
            for cell in live:
                name, state, step, loss, held_out, pace, eta, _ = row(cell)
                named = {"step": step, "loss": loss, "eval loss": held_out, "tokens/s": pace, "ETA": eta}
                figures = [f"{label} {value}" for label, value in named.items() if value]
                self.note(f"  {name}: {', '.join([state, *figures])}")

    def _ended(self) -> None:
        """Prints a line for each cell that has ended since the last call, and one for a new best."""
        self._over, new = self._standing.since(self._over)
        for one in new:
            self.note(over_line(self._standing.metric, one))
        if new and (best := self._standing.best) != self._best:
            self._best = best
            self.note(best_line(self._standing.metric, best))

    def note(self, text: str) -> None:
        """Prints a line."""
        self._rich.print(Text(text), soft_wrap=True)
