"""A sweep's cells and its results on stdout: for people, as CSV, as Markdown.

Runs in: the user's shell. Must not import torch or ray.

Lines of their own, not rich's tables: those cut figures off where a pipe is narrow, and take a second a thousand rows.
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
from raydist.report.sweep.conclusions import measured, value
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


def forecast(told: dict[str, Any], out: Console | None = None) -> None:
    """The object of `forecast.tell`."""
    out = out or Console(highlight=False)
    cells, totals = told["cells"], told["totals"]
    if cells:
        fields = list(dict.fromkeys(name for cell in cells for name in cell["parameters"]))
        amounts = {"gpu_hours": "GPU-hours>", "cost": "cost>"}  # where no cell has a GPU, they say nothing
        amounts = {name: head for name, head in amounts.items() if any(_positive(cell[name]) for cell in cells)}
        numbers = ["seed>", "workers>", "steps>", "tokens>", "time>", *amounts.values()]
        heads = ["cell", *_heads(fields, cells), *numbers]
        rows = [
            [
                cell["id"],
                *(_parameter(cell["parameters"].get(name)) for name in fields),
                *(_count(cell[name]) for name in ("seed", "workers", "steps", "tokens")),
                _reckoned(cell["by"], _span(cell["hours"])),
                *(_reckoned(cell["by"], _amount(cell[name])) for name in amounts),
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
    took = [f"{totals['cells']:,} cells, {totals['points']:,} points"]
    took += [f"{_count(totals['tokens'])} tokens"] if totals["tokens"] is not None else []
    if totals["hours"] is not None:
        took.append(f"about {_span(totals['hours'])} on the wall")
    if totals["gpu_hours"] is None or totals["gpu_hours"] > 0:
        for name, what in (("gpu_hours", "GPU-hours"), ("cost", "cost")):
            limit = told["limits"].get(name)
            of = "" if limit is None else f" of {limit:g}"
            took += [f"{what} {_amount(totals[name])}{of}"] if totals[name] is not None or of else []
    if told["limits"]["hours"] is not None:
        took.append(f"it pauses after {_span(told['limits']['hours'])} (limits.hours)")
    _say(out, "; ".join(took), "bold")
    for note in told["notes"]:
        _say(out, note)
    for over in told["over"]:
        _say(out, over, "yellow")


def _positive(amount: float | None) -> bool:
    return amount is not None and amount > 0


def _span(hours: float | None) -> str:
    return "-" if hours is None else text.span(hours * 3600)


def _reckoned(by: str | None, shown: str) -> str:
    """`~` before what nobody has measured."""
    return f"~{shown}" if shown != "-" and (by or "").startswith(RECKONED) else shown


def results(told: dict[str, Any], out: Console | None = None, failures: bool = True) -> None:
    """The object of `results.tell`, the best points first. `failures`: with the causes of those that failed."""
    out = out or Console(highlight=False)
    heads, rows, styles = _results(told)
    _print(heads, rows, styles, out)
    counts = ", ".join(f"{n:,} {status}" for status, n in told["counts"].items())
    totals = told["totals"]
    cost = "" if totals["cost"] is None else f"; cost {_amount(totals['cost'])}"
    gpus = f", {_amount(totals['gpu_hours'])} GPU-hours{cost}" if totals["gpu_hours"] else ""
    spent = f"{text.span(totals['seconds'])} of cells{gpus}"
    _say(out, f"{told['sweep']}: {counts}; {spent}", "bold")
    for line in told["analysis"]["words"]:
        _say(out, line)
    for row in told["points"]:
        if row["cause"] and row["status"] in (*(["failed"] if failures else []), "lost", "paused", "waiting"):
            _say(
                out,
                f"{row['cells'][0]}: {row['status']}: {row['cause']}",
                "red" if row["status"] == "failed" else "yellow",
            )


def markdown(told: dict[str, Any]) -> str:
    """The same table for a page."""
    heads, rows, _ = _results(told)
    sides = ["---:" if head.endswith(">") else "---" for head in heads]
    lines = [[head.removesuffix(">") for head in heads], sides, *rows]
    table = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
    return "\n".join([table, "", *(f"- {line}" for line in told["analysis"]["words"])])


def as_csv(told: dict[str, Any]) -> str:
    """A row a point, in the sweep's order: parameters by their fields, floats exact; lists as JSON."""
    sink = io.StringIO()
    rows = flatten(told)
    writer = csv.DictWriter(sink, list(rows[0]) if rows else ["point"], lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: json.dumps(v) if isinstance(v, list | dict) else v for k, v in row.items()} for row in rows)
    return sink.getvalue()


def _results(told: dict[str, Any]) -> tuple[list[str], list[list[str]], list[str]]:
    points, objective = told["points"], told["objective"]
    fields = list(dict.fromkeys(name for row in points for name in row["parameters"]))
    many = any(row["seeds"] > 1 for row in points)
    heads = [
        *_heads(fields, points),
        *(["seeds>"] if many else []),
        f"{objective['metric']}>",
        *(["95% interval>"] if many else []),
    ]
    amounts = _amounts(told)
    heads += ["tokens>", "time>", *amounts.values(), "status", "run"]
    sign = 1 if objective["mode"] == "min" else -1
    best = told["best"]

    def order(row: dict[str, Any]) -> tuple[bool, bool, float]:
        return row["status"] != "finished", row["objective"] is None, sign * (row["objective"] or 0.0)

    rows, styles = [], []
    for row in sorted(points, key=order):
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
            row["status"] + (f" ({', '.join(told_of)})" if (told_of := marks(told, row)) else ""),
            row["cells"][0] + (f" and {len(row['cells']) - 1} more" if len(row["cells"]) > 1 else ""),
        ])  # fmt: skip
        styles.append("bold green" if marked else _STYLES.get(row["status"], ""))
    return heads, rows, styles


def _amounts(told: dict[str, Any]) -> dict[str, str]:
    """Columns of what was spent, besides time: none without a GPU."""
    if not told["totals"]["gpu_hours"]:
        return {}
    return {"gpu_hours": "GPU-hours>", **({"cost": "cost>"} if told["totals"]["cost"] is not None else {})}


def _heads(fields: Sequence[str], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Of parameters: those that are numbers throughout on the right."""
    numbers = {name for name in fields if all(isinstance(row["parameters"].get(name), int | float) for row in rows)}
    return [f"{shortest(name)}{'>' if name in numbers else ''}" for name in fields]


def _print(heads: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str], out: Console) -> None:
    """`>` behind a heading: numbers, on the right. A style is that of its row's last columns' words."""
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
