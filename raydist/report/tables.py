"""Runs, one run and its steps as tables on stdout.

Runs in: the user's shell. Must not import torch or ray.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raydist.printable import printable
from raydist.report import text

_STYLES = {
    "running": "green",
    "finished": "bold green",
    "stopped": "red",
    "lost": "red",
    "interrupted": "yellow",
    "paused": "yellow",
}


def runs(found: list[dict[str, Any]], home: str, because: str, hint: str, out: Console | None = None) -> None:
    """Prints the list of `summary.runs`, its storage, the reason for this storage, and how to see others."""
    out = out or Console(highlight=False)
    where = Text(f"runs in {home} ({because}); {hint}", style="dim")
    if not found:
        out.print(Text(f"no runs in {home} ({because})"), soft_wrap=True)
        out.print(Text(f"start one with `raydist train JOB.yaml`, or {hint}"), soft_wrap=True)
        return
    rows = [("run", "status", "steps", "loss", "eval loss", "tokens/s")]
    for run in found:
        losses = (text.loss(run["loss"]), text.loss(run["eval_loss"]), text.rate(run["tokens_per_second"]))
        rows.append((run["run"], run["status"], str(run["steps"]), *losses))
    # Not a Table: of thousands of rows it takes seconds, and it breaks long names in two where stdout is no terminal.
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = Text("\n")
    for number, row in enumerate(rows):
        padded = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        lines.append(f"{row[0]}{padded[0]}  ", "" if number else "bold")
        lines.append(f"{row[1]}{padded[1]}", _STYLES.get(row[1], "") if number else "bold")
        rest = "".join(f"  {space}{cell}" for cell, space in zip(row[2:], padded[2:], strict=True))
        lines.append(f"{rest}\n", "" if number else "bold")
        if not number:
            lines.append("─" * (sum(widths) + 2 * len(widths) - 2) + "\n")
    out.print(lines, soft_wrap=True)
    out.print(where, soft_wrap=True)


def show(facts: dict[str, Any], out: Console | None = None) -> None:
    """Prints the object of `summary.show`."""
    out = out or Console(highlight=False)
    out.print(
        Text.assemble((facts["run"], "bold"), "  ", _status(facts["status"]), "  ", (facts["path"], "dim")),
        soft_wrap=True,
    )
    out.print(
        f"step {facts['steps']}   loss {text.loss(facts['loss'])}   eval loss {text.loss(facts['eval_loss'])}   "
        f"tokens/s {text.rate(facts['tokens_per_second'])}",
        soft_wrap=True,
    )
    if facts["attempts"]:
        table = columns("attempt>", "workers>", "first step>", "last step>", "startup>", "ended by")
        for attempt in facts["attempts"]:
            known = (attempt[key] for key in ("number", "world_size", "first_step", "last_step"))
            numbers = ("-" if value is None else str(value) for value in known)
            up = text.span(attempt["startup"]["seconds"]) if attempt["startup"] else "-"
            table.add_row(*numbers, up, Text(attempt["cause"] or ""))
        out.print(table)
    if facts["checkpoints"]:
        table = columns("checkpoint>", "size>", "best")
        for kept in facts["checkpoints"]:
            table.add_row(
                str(kept["step"]),
                "damaged" if kept["bytes"] is None else text.size(kept["bytes"]),
                "best" if kept["best"] else "",
            )
        out.print(table)
    if facts["faults"]:
        table = columns("injected", "rank>", "step>", "attempt>")
        for fault in facts["faults"]:
            table.add_row(*(str(fault[key]) for key in ("fault", "rank", "step", "attempt")))
        out.print(table)
    if facts["workers"]:
        table = columns("rank>", "host", "node ip", "pid>")
        for worker in facts["workers"]:
            table.add_row(*(str(worker[key]) for key in ("rank", "host", "node_ip", "pid")))
        out.print(table)


def steps(rows: Iterable[dict[str, Any]], out: Console | None = None) -> None:
    """Prints the steps of `summary.steps`, one line each, as they arrive: a long run is never in memory as a whole."""
    out = out or Console(highlight=False)
    form = "{:>9}  {:>10}  {:>9}  {:>9}  {:>9}  {:>9}  {:>8}  {:>8}  {:>7}  {:>7}  {}"
    names = (
        "step",
        "loss",
        "lr",
        "grad norm",
        "noise",
        "tokens",
        "seconds",
        "data s",
        "workers",
        "attempt",
        "samples hash",
    )
    out.print(form.format(*names), style="bold", soft_wrap=True)
    for row in rows:
        norm, noise = ("-" if row[key] is None else f"{row[key]:.3g}" for key in ("grad_norm", "grad_noise_scale"))
        times = (f"{row['seconds']:.4f}", f"{row['data_seconds']:.4f}")
        head = (row["step"], text.loss(row["loss"]), f"{row['lr']:.2e}", norm, noise, row["tokens"])
        line = form.format(*head, *times, row["world_size"], row["attempt"], row["samples_hash"])
        out.print(printable(line), soft_wrap=True, markup=False)


def profile(found: list[dict[str, Any]], names: list[str], out: Console | None = None) -> None:
    """Prints the list of `profile.measured`; `names`: the requested metrics."""
    out = out or Console(highlight=False)
    table = columns("metric", "of", "host", "mean>", "least>", "most>", "", "wanted")
    for row in found:
        of = " ".join(f"{key} {row[key]}" for key in ("rank", "gpu") if row.get(key) is not None) or "node"
        values = (text.quantity(row[key], row["unit"]) for key in ("mean", "least", "most"))
        verdict = Text("") if row["ok"] is None else Text("ok", "green") if row["ok"] else Text("LOOK", "bold red")
        table.add_row(row["metric"], of, row["host"], *values, verdict, row["wanted"] or "")
    out.print(table)
    for name in dict.fromkeys(row["metric"] for row in found if row["ok"] is False):
        remedy = next(row["remedy"] for row in found if row["metric"] == name and row["remedy"])
        out.print(Text.assemble((f"{name}: ", "bold"), remedy), soft_wrap=True)
    if missing := [name for name in names if name not in {row["metric"] for row in found}]:
        out.print(f"no data for: {', '.join(missing)}", soft_wrap=True)


def trace(facts: dict[str, Any], out: Console | None = None) -> None:
    """Prints the object of `raydist.report.trace.merge`: the shares of each rank's time, and the offsets of the hosts' clocks."""
    out = out or Console(highlight=False)
    table = columns("rank>", "host", "compute>", "comm>", "overlap>", "exposed>", "data wait>", "checkpoint>")
    clocks: dict[str, str] = {}
    for rank in facts["ranks"]:
        overlap = "-" if rank["overlap"] is None else f"{rank['overlap']:.0%}"
        shares = [f"{rank[name]:.1%}" for name in ("compute", "communication")]
        rest = [f"{rank[name]:.1%}" for name in ("exposed", "data_wait", "checkpoint")]
        table.add_row(str(rank["rank"]), Text(rank["host"]), *shares, overlap, *rest)
        error, lead = rank["clock_error_seconds"], rank["clock_offset_seconds"]
        if error is None:
            clocks[rank["host"]] = "not known"
        elif error:
            clocks[rank["host"]] = f"{lead * 1e3:+.3f} ms, ±{error * 1e3:.3f} at most"
    out.print(table)
    out.print(
        "shares of the steps' time; overlap: share of comm that is overlapped with computation",
        style="dim",
        soft_wrap=True,
    )
    for host, lead in clocks.items():
        out.print(f"clock of {host} relative to {facts['ranks'][0]['host']}, subtracted: {lead}", soft_wrap=True)


def columns(*columns: str) -> Table:
    """`>` after a heading: a column of numbers, aligned right."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name.removesuffix(">"), justify="right" if name.endswith(">") else "left", overflow="fold")
    return table


def _status(status: str) -> Text:
    return Text(status, style=_STYLES.get(status, ""))
