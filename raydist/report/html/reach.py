"""The time and cost at which the cells of a sweep reached each value of its objective: two charts, and the fronts as tables.

Runs anywhere. Pure: raydist/report/sweep/time_to_loss.py computes the data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from raydist.report import text
from raydist.report.html.charts import Across, Form, Series, lines
from raydist.report.html.elements import Markup, tag
from raydist.report.html.page import table
from raydist.report.sweep.conclusions import UNITS, measured, named
from raydist.report.sweep.time_to_loss import Axis

LINES = 500
"""Maximum number of points whose course is drawn, the best ones; the fronts are over all points."""
ROWS = 200
"""Maximum number of rows of a table; the last ones are shown."""
_LOG = 20.0
"""The axis is logarithmic if the maximum is at least this many times the minimum."""
Row = Mapping[str, Any]


def charts(summary: Row) -> list[Markup] | None:
    """Both charts, each with its front below; None if no cell has reported the objective while it trained."""
    if not summary["pareto"]["seconds"]:
        return None
    many = any(row["seeds"] > 1 for row in summary["points"])
    about = (
        "Seconds are those of training steps, of all attempts, without start-up, evaluations and checkpoints. "
        f"{'Points with several seeds show the mean, the minimum and the maximum. ' if many else ''}"
        "The stepped line is the front: no cell was as good earlier, or for less. A number marks where a cell first reaches it."
    )
    both: tuple[Axis, Axis] = ("seconds", "amount")
    return [tag("p", about), tag("div", [_part(summary, axis) for axis in both], class_="charts")]


def _part(summary: Row, axis: Axis) -> Markup:
    front, metric, unit = summary["pareto"][axis], summary["objective"]["metric"], summary["pareto"]["unit"]
    sign = 1 if summary["objective"]["mode"] == "min" else -1
    rows = {row["point"]: row for row in summary["points"]}
    known = [row for row in summary["points"] if row["course"] is not None]
    known.sort(key=lambda row: sign * row["course"]["objective"][-1])
    every = np.concatenate([np.array(row["course"][axis], dtype=np.float64) for row in known])
    low, high = float(every.min()), float(every.max())
    log = low > 0 and high >= _LOG * low
    courses = [
        _stairs(row["course"][axis], _best(row["course"]["objective"], front[0]["objective"], sign), "faint")
        for row in known[:LINES]
    ]
    order = list(dict.fromkeys(one["point"] for one in front))
    number = {point: str(i) for i, point in enumerate(order, start=1)}
    names = {point: f"{number[point]} {named(rows[point]['parameters']) or rows[point]['cells'][0]}" for point in order}
    mine = {point: [one for one in front if one["point"] == point] for point in order}
    series = [
        Series(
            names[point],
            _floats(axis, ones),
            _floats("objective", ones),
            "dots",
            [number[point], *[""] * (len(ones) - 1)],
        )
        for point, ones in mine.items()
    ]
    name = "seconds trained" if axis == "seconds" else UNITS[unit] + (" (no GPU)" if unit == "worker_hours" else "")
    form: Form = "clock" if axis == "seconds" else "number"
    chart = lines(
        f"{metric} over {name}",
        series,
        Across(name, form, "log" if log else "time" if axis == "seconds" else "value"),
        about="the best value of each cell so far; the stepped line is the front of all cells",
        behind=[*courses, _stairs(_floats(axis, front), _floats("objective", front), "line")],
    )
    return tag("div", chart, _table(front, axis, names if len(names) == 1 else number, name, metric))


def _stairs(x: Sequence[float] | np.ndarray, y: np.ndarray, style: Literal["line", "faint"]) -> Series:
    """Steps: between two evaluations, the value of the first one holds."""
    return Series("", np.repeat(x, 2)[1:], np.repeat(y, 2)[:-1], style)


def _best(values: Sequence[float], worst: float, sign: int) -> np.ndarray:
    """The best so far. Values worse than the whole front are left out, because they would compress the rest."""
    best = sign * np.minimum.accumulate(sign * np.array(values, dtype=np.float64))
    return np.where(sign * best <= sign * worst, best, np.nan)


def _floats(name: str, rows: Sequence[Row]) -> np.ndarray:
    return np.array([one[name] for one in rows], dtype=np.float64)


def _table(front: Sequence[Row], axis: Axis, names: Mapping[int, str], name: str, metric: str) -> Markup:
    ranges = any(one["objective_range"] is not None for one in front)
    between = ("seeds>",) if ranges else ()
    rows = [
        (
            names[one["point"]],
            f"{one['step']:,}",
            _took(axis, one[axis]),
            *((_range(one[f"{axis}_range"], lambda v: _took(axis, v)),) if ranges else ()),
            measured(one["objective"]),
            *((_range(one["objective_range"], measured),) if ranges else ()),
        )
        for one in front[-ROWS:]
    ]
    more = f"The last {ROWS} of {len(front):,}; raydist sweep results --json has all." if len(front) > ROWS else None
    columns = ("cell", "step>", f"{name}>", *between, f"{metric}>", *between)
    return tag(
        "details",
        tag("summary", f"The front as a table, {len(front):,} evaluations"),
        table(columns, rows),
        tag("p", more, class_="note") if more else None,
    )


def _took(axis: Axis, value: float) -> str:
    return text.span(value) if axis == "seconds" else f"{value:.3g}"


def _range(ends: Sequence[float] | None, form: Callable[[float], str]) -> str:
    return "-" if ends is None else f"{form(ends[0])} to {form(ends[1])}"
