"""The page of `raydist sweep report` about a sweep.

Runs anywhere. Pure: `raydist.report.sweep.results` reads the sweep, and `raydist.report.sweep.curves` the best cells' runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from raydist.report import text
from raydist.report.html import charts as draw
from raydist.report.html import reach
from raydist.report.html.charts import Across, Axis, Mark, Series
from raydist.report.html.elements import Child, Markup, tag
from raydist.report.html.page import cards, missing, page, section, table
from raydist.report.sweep.analysis import is_number
from raydist.report.sweep.base_values import marks
from raydist.report.sweep.conclusions import BATCH, RATE, measured, named, ranked, value
from raydist.report.sweep.curves import Curve
from raydist.spec.sweep.names import shortest

MOST = draw.SERIES
"""Maximum number of series of a chart: the number of colours."""
ROWS = 500
Row = Mapping[str, Any]


def render(summary: Row, curves: Sequence[Curve]) -> bytes:
    """The page, in UTF-8."""
    return page(
        f"{summary['sweep']}: {_counts(summary)}",
        *parts(summary, curves).values(),
        tag("footer", "Created by raydist from the sweep's folder. This file needs no network."),
    )


def parts(summary: Row, curves: Sequence[Curve], link: Callable[[str], Child] = str) -> dict[str, Markup]:
    """The elements of the page by their ids, in order: the heading with the figures, then the sections. `link`: how the id of a
    cell is shown."""
    finished = [row for row in summary["points"] if row["status"] == "finished" and row["objective"] is not None]
    drawn = (_map(summary, finished), _rate(summary, finished), _losses(curves), _front(summary, finished))
    charts = [part for part in drawn if part]
    courses = reach.charts(summary)
    path = tag("p", summary["path"], class_="path quiet")
    sections = {
        "words": ("Conclusions", tag("ul", [tag("li", line) for line in summary["analysis"]["words"]])),
        "charts": ("Charts", tag("div", charts, class_="charts") if charts else missing("No cell has finished yet.")),
        **({"reach": ("Time and cost to reach a loss", courses)} if courses else {}),
        "parameters": ("Parameters", _parallel(summary, finished)),
        **({"lineage": ("Lineage", _lineage(summary))} if any(any(r["lineage"]) for r in summary["points"]) else {}),
        "points": ("Points", _points(summary, link)),
    }
    head = tag("header", tag("h1", summary["sweep"]), path, cards(_cards(summary)), id="head")
    return {"head": head, **{name: section(title, body, id=name) for name, (title, body) in sections.items()}}


def _counts(summary: Row) -> str:
    return ", ".join(f"{n:,} {status}" for status, n in summary["counts"].items())


def _cards(summary: Row) -> list[tuple[str, str, str]]:
    totals, metric = summary["totals"], summary["objective"]["metric"]
    best = None if summary["best"] is None else summary["points"][summary["best"]]
    spread = f"{measured(best['low'])} to {measured(best['high'])}" if best and best["low"] is not None else ""
    shown = [
        (metric, measured(best["objective"]) if best else "-", spread or "of the best point"),
        (
            "points",
            f"{len(summary['points']):,}",
            ", ".join(f"{n:,} cells {status}" for status, n in summary["counts"].items()),
        ),
        ("tokens", f"{totals['tokens'] or 0:,}", "all cells together"),
        ("time of cells", text.span(totals["seconds"] or 0.0), "sum over all cells"),
    ]
    if not totals["gpu_hours"]:
        return shown
    shown.append(("GPU-hours", f"{totals['gpu_hours']:.3g}", ""))
    return [*shown, ("cost", f"{totals['cost']:.3g}", "")] if totals["cost"] is not None else shown


def _map(summary: Row, finished: Sequence[Row]) -> Markup | None:
    """The objective over two parameters, learning rate and batch first; with more parameters, the best over the others."""
    fields = list(dict.fromkeys(name for row in finished for name in row["parameters"]))
    varied = [name for name in fields if 1 < len(_values(finished, name)) <= 40]
    varied.sort(key=lambda name: (name != RATE, name != BATCH))
    if len(varied) < 2:
        return None
    down, across = varied[:2]
    rows, columns = _values(finished, down)[::-1], _values(finished, across)
    sign = _sign(summary)
    grid = np.full((len(rows), len(columns)), np.nan)
    for row in finished:
        if row["parameters"].get(down) is not None and row["parameters"].get(across) is not None:
            at = rows.index(row["parameters"][down]), columns.index(row["parameters"][across])
            grid[at] = (
                row["objective"] if math.isnan(grid[at]) or sign * row["objective"] < sign * grid[at] else grid[at]
            )
    low, high = float(np.nanmin(grid)), float(np.nanmax(grid))
    more = ", the best over the other parameters" if len(varied) > 2 else ""
    found = draw.Grid(
        grid,
        [value(v) for v in rows],
        [value(v) for v in columns],
        (low, high),
        named=_named(summary, rows, columns, down, across),
    )
    return draw.heat(
        f"{summary['objective']['metric']} by {shortest(down)} and {shortest(across)}",
        found,
        Across(shortest(across), ticks=()),
        y_name=shortest(down),
        about=f"the objective of each point{more}; empty where none has finished",
        marks=_critical(finished, columns) if across == BATCH else (),
    )


def _named(
    summary: Row, rows: Sequence[Any], columns: Sequence[Any], down: str, across: str
) -> list[tuple[int, int, str]]:
    """The cells of the map that contain the best point and the point with the base's values."""
    found: dict[tuple[int, int], list[str]] = {}
    for row in summary["points"]:
        at = row["parameters"].get(down), row["parameters"].get(across)
        if (words := marks(summary, row)) and at[0] in rows and at[1] in columns:
            found.setdefault((rows.index(at[0]), columns.index(at[1])), []).extend(words)
    return [(*at, ", ".join(words)) for at, words in found.items()]


def _critical(finished: Sequence[Row], columns: Sequence[Any]) -> list[Mark]:
    """A mark at the gradient noise scale, the median over points, among the batches: between columns by logarithm."""
    scales = [row["grad_noise_scale"] for row in finished if row["grad_noise_scale"]]
    if not scales:
        return []
    scale = float(np.median(scales))
    place = float(
        np.interp(math.log(scale), np.log(np.array(columns, dtype=np.float64)), np.arange(len(columns)) + 0.5)
    )
    side = "" if columns[0] <= scale <= columns[-1] else ", below" if scale < columns[0] else ", beyond"
    return [Mark(place, f"noise scale {scale:.3g}{side}")]


def _rate(summary: Row, finished: Sequence[Row]) -> Markup | None:
    """The objective over the learning rate, one line per setting of the others, with marks at the fitted optima."""
    groups: dict[str, list[Row]] = {}
    for row in finished:
        others = {name: v for name, v in row["parameters"].items() if name != RATE}
        groups.setdefault(named(others), []).append(row)
    series = []
    for name, rows in list(groups.items())[:MOST]:
        known = sorted(
            (float(rate), r["objective"]) for r in rows if is_number(rate := r["parameters"].get(RATE)) and rate > 0
        )
        if len(known) > 1:
            x, y = (np.array(side) for side in zip(*known, strict=True))
            series.append(Series(name, x, y))
    if not series:
        return None
    fits = summary["analysis"]["optima"]
    places = [Mark(one["optimum"], f"{one['optimum']:.2g}") for one in fits[:MOST] if one["inside"]]
    at = summary["analysis"]["base"]
    if at is not None and (rate := summary["points"][at]["parameters"].get(RATE, 0)) > 0:
        places.append(Mark(float(rate), "base"))
    ticks = sorted({float(x) for one in series for x in one.x})
    return draw.lines(
        f"{summary['objective']['metric']} over {shortest(RATE)}",
        series,
        Across(shortest(RATE), "number", "log", ticks=ticks[:: -(-len(ticks) // 8)]),
        about="one line per setting of the other parameters; a vertical line at each fitted optimum, and at the base's value",
        marks=places,
    )


def _parallel(summary: Row, finished: Sequence[Row]) -> Markup:
    """Every parameter that was varied, and the objective: one line per point, for at most the ROWS best points."""
    fields = [name for name in dict.fromkeys(n for row in finished for n in row["parameters"]) if _many(finished, name)]
    sign = _sign(summary)
    rows = sorted(
        (r for r in finished if all(n in r["parameters"] for n in fields)), key=lambda r: sign * r["objective"]
    )[:ROWS]
    if not fields or not rows:
        return missing("No two points with different parameters have finished yet.")
    columns = [_column(name, [row["parameters"][name] for row in rows]) for name in fields]
    objective = np.array([row["objective"] for row in rows], dtype=np.float64)
    columns.append(Axis(summary["objective"]["metric"], objective))
    metric = summary["objective"]["metric"]
    return draw.parallel(
        f"{metric} by all parameters",
        columns,
        [f"{named(row['parameters'])}: {metric} {measured(row['objective'])}" for row in rows],
        best=0,
        about="one axis per parameter, the objective on the right; one line per point, the thick one is the best",
    )


def _column(name: str, values: Sequence[Any]) -> Axis:
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        numbers = np.array(values, dtype=np.float64)
        log = bool(numbers.min() > 0 and numbers.max() / numbers.min() >= 8)
        few = sorted(set(numbers.tolist()))
        return Axis(shortest(name), numbers, log=log, ticks=few if len(few) <= 8 else ())
    words = [value(v) for v in values]
    known = sorted(set(words))
    return Axis(shortest(name), np.array([known.index(w) for w in words], dtype=np.float64), words=known)


def _many(rows: Sequence[Row], name: str) -> bool:
    """Whether it has at least two values."""
    first = rows[0]["parameters"].get(name)
    return any(row["parameters"].get(name) != first for row in rows)


def _losses(curves: Sequence[Curve]) -> Markup | None:
    series = [Series(one.name, one.tokens, one.losses) for one in curves[:MOST] if len(one.tokens)]
    if not series:
        return None
    about = "loss of the best cells over the tokens they have trained"
    return draw.lines("Loss over tokens", series, Across("tokens"), unit="the best cells", about=about)


def _front(summary: Row, finished: Sequence[Row]) -> Markup | None:
    """Objective over time or cost, and the front: points for which no other is as good for less."""
    cost = "gpu_hours" if any(row["gpu_hours"] for row in finished) else "seconds"
    known = sorted((float(row[cost]), float(row["objective"])) for row in finished if row[cost])
    if len(known) < 2:
        return None
    sign, best = _sign(summary), math.inf
    front = []
    for spent, objective in known:
        if sign * objective < best:
            best = sign * objective
            front.append((spent, objective))
    x, y = (np.array(side) for side in zip(*known, strict=True))
    at, reached = (np.array(side) for side in zip(*front, strict=True))
    name = "GPU-hours" if cost == "gpu_hours" else cost
    return draw.lines(
        f"{summary['objective']['metric']} over {name}",
        [Series("points", x, y, "dots"), Series("front", at, reached)],
        Across(name, "number"),
        about="each point by its time or cost; the line joins the points for which no other is as good for less",
    )


def _lineage(summary: Row) -> Markup:
    steps = [
        (step["at"], cell, step)
        for row in summary["points"]
        for cell, mine in zip(row["cells"], row["lineage"], strict=True)
        for step in mine
    ]
    cells = [
        (
            cell,
            f"{step['tokens']:,}",
            step["source"],
            ", ".join(f"{shortest(k)} {value(a)} -> {value(b)}" for k, (a, b) in step["changes"].items()),
        )
        for _, cell, step in sorted(steps, key=lambda one: one[0])
    ]
    return table(("cell", "tokens>", "continued from", "changes~"), cells)


def _points(summary: Row, link: Callable[[str], Child]) -> list[Markup | None]:
    fields = list(dict.fromkeys(name for row in summary["points"] for name in row["parameters"]))
    best = ranked(summary)
    columns = (
        "cell",
        *map(shortest, fields),
        f"{summary['objective']['metric']}>",
        "95% interval>",
        "tokens>",
        "time>",
        "status",
        "cause~",
    )
    rows = [
        (
            link(row["cells"][0]),
            *("-" if row["parameters"].get(name) is None else value(row["parameters"][name]) for name in fields),
            measured(row["objective"]),
            "-" if row["low"] is None else f"{measured(row['low'])} to {measured(row['high'])}",
            "-" if row["tokens"] is None else f"{row['tokens']:,}",
            text.span(row["seconds"]) if row["seconds"] else "-",
            ", ".join([row["status"], *marks(summary, row)]),
            row["cause"] or "",
        )
        for row in best[:ROWS]
    ]
    more = (
        tag("p", f"The best {ROWS} of {len(best):,}; results.parquet has all.", class_="note")
        if len(best) > ROWS
        else None
    )
    return [table(columns, rows), more]


def _values(rows: Sequence[Row], name: str) -> list[Any]:
    """The different values of a parameter, numbers ascending."""
    found: list[Any] = []
    for row in rows:
        v = row["parameters"].get(name)
        if v is not None and v not in found and len(found) <= 40:
            found.append(v)
    return sorted(found, key=lambda v: (not isinstance(v, int | float), v if isinstance(v, int | float) else str(v)))


def _sign(summary: Row) -> int:
    return 1 if summary["objective"]["mode"] == "min" else -1
