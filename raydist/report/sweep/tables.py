"""A sweep's cells and its results on stdout: for people, as CSV, as Markdown.

Runs in: the user's shell. Must not import torch or ray.

Prints plain lines instead of rich's tables, which truncate figures if a pipe is narrow, and take 1 s per 1,000 rows.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from raydist.report import text
from raydist.report.sweep.base_values import marks
from raydist.report.sweep.conclusions import measured, ranked, value
from raydist.report.sweep.forecast import RECKONED
from raydist.report.sweep.results import flatten
from raydist.spec.sweep.names import shortest

_STYLES = {
    "finished": "green",
    "running": "green",
    "failed": "red",
    "lost": "red",
    "paused": "yellow",
    "invalid": "red",
}


def forecast(summary: dict[str, Any], out: Console | None = None) -> None:
    """Prints the object of `forecast.tell`."""
    out = out or Console(highlight=False)
    cells, totals = summary["cells"], summary["totals"]
    if cells:
        fields = list(dict.fromkeys(name for cell in cells for name in cell["parameters"]))
        amounts = {"gpu_hours": "GPU-hours>", "cost": "cost>"}  # left out if no cell has a GPU
        amounts = {name: head for name, head in amounts.items() if any(_positive(cell[name]) for cell in cells)}
        numbers = ["seed>", "workers>", "steps>", "tokens>", "time>", *amounts.values()]
        heads = ["cell", *_heads(fields, cells), *numbers]
        rows = [
            [
                cell["id"],
                *(_parameter(cell["parameters"].get(name)) for name in fields),
                *(_count(cell[name]) for name in ("seed", "workers", "steps", "tokens")),
                _estimated(cell["by"], _span(cell["hours"])),
                *(_estimated(cell["by"], _amount(cell[name])) for name in amounts),
            ]
            for cell in cells
        ]
        _print(heads, rows, ["invalid" if cell["problems"] else "" for cell in cells], out)
        having: dict[str, list[str]] = {}
        for cell in cells:
            for note in cell["notes"]:
                having.setdefault(note, []).append(cell["id"])
        for note, them in having.items():
            _say(out, f"{them[0]}{f' and {len(them) - 1} more' if len(them) > 1 else ''}: {note}", "dim")
    parts = [f"{totals['cells']:,} cells, {totals['points']:,} points"]
    parts += [f"{_count(totals['tokens'])} tokens"] if totals["tokens"] is not None else []
    if totals["hours"] is not None:
        parts.append(f"about {_span(totals['hours'])} wall time")
    if totals["gpu_hours"] is None or totals["gpu_hours"] > 0:
        for name, what in (("gpu_hours", "GPU-hours"), ("cost", "cost")):
            limit = summary["limits"].get(name)
            of = "" if limit is None else f" of {limit:g}"
            parts += [f"{what} {_amount(totals[name])}{of}"] if totals[name] is not None or of else []
    if summary["limits"]["hours"] is not None:
        parts.append(f"it pauses after {_span(summary['limits']['hours'])} (limits.hours)")
    _say(out, "; ".join(parts), "bold")
    for note in summary["notes"]:
        _say(out, note)
    for over in summary["over"]:
        _say(out, over, "yellow")


def _positive(amount: float | None) -> bool:
    return amount is not None and amount > 0


def _span(hours: float | None) -> str:
    return "-" if hours is None else text.span(hours * 3600)


def _estimated(by: str | None, shown: str) -> str:
    """Adds `~` to a value that is estimated, not measured."""
    return f"~{shown}" if shown != "-" and (by or "").startswith(RECKONED) else shown


def results(summary: dict[str, Any], out: Console | None = None, failures: bool = True) -> None:
    """Prints the object of `results.tell`, the best points first. `failures`: with the causes of failed points."""
    out = out or Console(highlight=False)
    heads, rows, styles = _results(summary)
    _print(heads, rows, styles, out)
    counts = ", ".join(f"{n:,} {status}" for status, n in summary["counts"].items())
    totals = summary["totals"]
    cost = "" if totals["cost"] is None else f"; cost {_amount(totals['cost'])}"
    gpus = f", {_amount(totals['gpu_hours'])} GPU-hours{cost}" if totals["gpu_hours"] else ""
    spent = f"cells took {text.span(totals['seconds'] or 0.0)}{gpus}"
    _say(out, f"{summary['sweep']}: {counts}; {spent}", "bold")
    for line in summary["analysis"]["words"]:
        _say(out, line)
    for row in summary["points"]:
        if row["cause"] and row["status"] in (*(["failed"] if failures else []), "lost", "paused", "waiting"):
            _say(
                out,
                f"{row['cells'][0]}: {row['status']}: {row['cause']}",
                "red" if row["status"] == "failed" else "yellow",
            )


def markdown(summary: dict[str, Any]) -> str:
    """The same table as Markdown."""
    heads, rows, _ = _results(summary)
    sides = ["---:" if head.endswith(">") else "---" for head in heads]
    lines = [[head.removesuffix(">") for head in heads], sides, *rows]
    table = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
    return "\n".join([table, "", *(f"- {line}" for line in summary["analysis"]["words"])])


def as_csv(summary: dict[str, Any]) -> str:
    """CSV, one row per point, in the sweep's order: parameters by their fields, floats exact; lists as JSON."""
    sink = io.StringIO()
    rows = flatten(summary)
    writer = csv.DictWriter(sink, list(rows[0]) if rows else ["point"], lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: json.dumps(v) if isinstance(v, list | dict) else v for k, v in row.items()} for row in rows)
    return sink.getvalue()


def _results(summary: dict[str, Any]) -> tuple[list[str], list[list[str]], list[str]]:
    points, objective = summary["points"], summary["objective"]
    fields = list(dict.fromkeys(name for row in points for name in row["parameters"]))
    many = any(row["seeds"] > 1 for row in points)
    heads = [
        *_heads(fields, points),
        *(["seeds>"] if many else []),
        f"{objective['metric']}>",
        *(["95% interval>"] if many else []),
    ]
    amounts = _amounts(summary)
    heads += ["tokens>", "time>", *amounts.values(), "status", "run"]
    best = summary["best"]
    rows, styles = [], []
    for row in ranked(summary):
        marked = best is not None and row["point"] == points[best]["point"]
        spread = "-" if row["low"] is None else f"{measured(row['low'])} to {measured(row['high'])}"
        rows.append([
            *(_parameter(row["parameters"].get(name)) for name in fields),
            *([str(row["seeds"])] if many else []),
            measured(row["objective"]),
            *([spread] if many else []),
            _count(row["tokens"]),
            text.span(row["seconds"]) if row["seconds"] else "-",
            *(_amount(row[name]) for name in amounts),
            row["status"] + (f" ({', '.join(labels)})" if (labels := marks(summary, row)) else ""),
            row["cells"][0] + (f" and {len(row['cells']) - 1} more" if len(row["cells"]) > 1 else ""),
        ])  # fmt: skip
        styles.append("bold green" if marked else _STYLES.get(row["status"], ""))
    return heads, rows, styles


def _amounts(summary: dict[str, Any]) -> dict[str, str]:
    """Columns of cost, besides time: none without a GPU."""
    if not summary["totals"]["gpu_hours"]:
        return {}
    return {"gpu_hours": "GPU-hours>", **({"cost": "cost>"} if summary["totals"]["cost"] is not None else {})}


def _heads(fields: Sequence[str], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Headings of parameters; columns of numbers only are aligned right."""
    numbers = {name for name in fields if all(isinstance(row["parameters"].get(name), int | float) for row in rows)}
    return [f"{shortest(name)}{'>' if name in numbers else ''}" for name in fields]


def _print(heads: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str], out: Console) -> None:
    """`>` after a heading: a column of numbers, aligned right. `styles`: one per row, a rich style or a status."""
    widths = [
        max(len(head.removesuffix(">")), *(len(row[i]) for row in rows)) if rows else len(head)
        for i, head in enumerate(heads)
    ]

    def line(cells: Sequence[str]) -> str:
        padded = (c.rjust(w) if h.endswith(">") else c.ljust(w) for c, w, h in zip(cells, widths, heads, strict=True))
        return "  ".join(padded).rstrip()

    _say(out, line([head.removesuffix(">") for head in heads]), "bold")
    for row, style in zip(rows, styles, strict=True):
        _say(out, line(row), _STYLES.get(style, style))


def _say(out: Console, line: str, style: str = "") -> None:
    out.print(Text(line, style), soft_wrap=True)


def _parameter(v: Any) -> str:
    return "-" if v is None else value(v)


def _count(v: int | None) -> str:
    return "-" if v is None else f"{v:,}"


def _amount(v: float | None) -> str:
    return "-" if v is None else f"{v:.3g}" if v < 1000 else f"{v:,.0f}"
