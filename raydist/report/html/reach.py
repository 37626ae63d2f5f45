"""How soon, and for how much, the cells of a sweep came to each value of its objective: two charts, and the fronts as tables.

Runs anywhere. Pure: raydist/report/sweep/time_to_loss.py has what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from raydist.report import text
from raydist.report.html import axes, lines
from raydist.report.html.lines import Label, Series
from raydist.report.html.page import table
from raydist.report.html.svg import Markup, tag
from raydist.report.sweep.conclusions import UNITS, measured, named
from raydist.report.sweep.time_to_loss import Axis

LINES = 500
"""Points whose course is drawn, the best ones; the fronts are those of all."""
ROWS = 200
"""Of a table, the last ones."""
_LOG = 20.0
"""Times the least that the most is from which on the axis is by powers."""
Row = Mapping[str, Any]


def charts(told: Row) -> list[Markup] | None:
    """Both, each with its front below; None where no cell has told the objective while it trained."""
    if not told["pareto"]["seconds"]:
        return None
    many = any(row["seeds"] > 1 for row in told["points"])
    about = (
        "Seconds are those of training steps, of all attempts; start-up, evaluations and checkpoints come on top. "
        f"{'Of several seeds the mean, and the least and the most of them. ' if many else ''}"
        "The stairs are the front: nothing was as good any sooner, or for less. A number stands where a cell first takes it."
    )
    both: tuple[Axis, Axis] = ("seconds", "amount")
    return [tag("p", about), tag("div", [_part(told, axis) for axis in both], class_="charts")]


def _part(told: Row, axis: Axis) -> Markup:
    front, metric, unit = told["pareto"][axis], told["objective"]["metric"], told["pareto"]["unit"]
    sign = 1 if told["objective"]["mode"] == "min" else -1
    rows = {row["point"]: row for row in told["points"]}
    known = [row for row in told["points"] if row["course"] is not None]
    known.sort(key=lambda row: sign * row["course"]["objective"][-1])
    every = np.concatenate([np.array(row["course"][axis]) for row in known])
    scale = _Across(axis, float(every.min()), float(every.max()))
    courses = [
        _stairs(scale(row["course"][axis]), _best(row["course"]["objective"], front[0]["objective"], sign), "faint")
        for row in known[:LINES]
    ]
    order = list(dict.fromkeys(one["point"] for one in front))
    number = {point: str(i) for i, point in enumerate(order, start=1)}
    names = {point: f"{number[point]} {named(rows[point]['parameters']) or rows[point]['cells'][0]}" for point in order}
    mine = {point: [one for one in front if one["point"] == point] for point in order}
    series = [
        Series(names[point], scale([one[axis] for one in ones]), _values(ones), "dots") for point, ones in mine.items()
    ]
    name = "seconds trained" if axis == "seconds" else UNITS[unit] + (" (no GPU)" if unit == "worker_hours" else "")
    chart = lines.chart(
        f"{metric} over {name}",
        series,
        unit="log scale" if scale.log else "",
        about="the best that each cell had come to by then; the stairs are the front of all cells",
        form=measured,
        x_form=scale.form,
        x_ticks=scale.ticks,
        x_tick_form=scale.tick,
        x_name=name,
        behind=[*courses, _stairs(scale([one[axis] for one in front]), _values(front), "line")],
        labels=[
            Label(float(one.x[0]), float(one.y[0]), number[point]) for point, one in zip(mine, series, strict=True)
        ],
    )
    return tag("div", chart, _table(front, axis, names if len(names) == 1 else number, name, metric))


def _stairs(x: np.ndarray, y: np.ndarray, style: Literal["line", "faint"]) -> Series:
    """Between two evaluations a cell has come to the first one's value."""
    return Series("", np.repeat(x, 2)[1:], np.repeat(y, 2)[:-1], style)


def _best(values: Sequence[float], worst: float, sign: int) -> np.ndarray:
    """The best so far; what is worse than all of the front is left out, for it would press the rest together."""
    best = sign * np.minimum.accumulate(sign * np.array(values, dtype=np.float64))
    return np.where(sign * best <= sign * worst, best, np.nan)


def _values(rows: Sequence[Row]) -> np.ndarray:
    return np.array([one["objective"] for one in rows], dtype=np.float64)


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


def _range(ends: Sequence[float] | None, form: axes.Form) -> str:
    return "-" if ends is None else f"{form(ends[0])} to {form(ends[1])}"


class _Across:
    """From seconds or an amount to the chart's own x: their logarithm to base 10 where they range far."""

    def __init__(self, axis: Axis, low: float, high: float) -> None:
        self._axis, self.log = axis, low > 0 and high >= _LOG * low
        linear = axes.time_ticks if axis == "seconds" else axes.ticks
        self.ticks = [math.log10(v) for v in axes.log_ticks(low, high)] if self.log else linear(low, high)

    def __call__(self, values: Sequence[float]) -> np.ndarray:
        return np.log10(values) if self.log else np.array(values, dtype=np.float64)

    def form(self, x: float) -> str:
        """Under the pointer."""
        return _took(self._axis, 10**x if self.log else x)

    def tick(self, x: float) -> str:
        """Below the axis."""
        value = 10**x if self.log else x
        return axes.clock(value) if self._axis == "seconds" else f"{value:.3g}"
