"""Figures of charts: a caption, their data as JSON, which chart.js draws with Apache ECharts, and the same in words.

Runs anywhere. Pure. Points are reduced here: however long a run is, a page stays small, and no outlier is lost.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from raydist.redact import redact
from raydist.report.html.elements import Markup, tag

COLUMNS = 1000
"""With more than four points for each: of the points in a column only the first, the lowest, the highest and the last are sent."""
HEIGHT = 250
"""Of a line chart, in pixels."""
SERIES = 6
"""Number of colours of series; a chart with more repeats them."""
_DIGITS = 7
"""Significant digits of values."""

Array = NDArray[np.float64]
Form = Literal["number", "whole", "clock", "mib", "percent", "power"]
"""How chart.js writes a number: plain, with thousands separators, seconds as a clock, MiB as a size, a share as a percentage, or 2
to its power as a factor."""


@dataclass(frozen=True)
class Series:
    """x [N] ascending, y [N]; NaN interrupts the line. `style`: a line, a thin pale line, or points. `labels` [N]: of points."""

    name: str
    x: Array
    y: Array
    style: Literal["line", "faint", "dots"] = "line"
    labels: Sequence[str] = ()


@dataclass(frozen=True)
class Mark:
    """A vertical line at x, with a label on top; `kind`: its style."""

    x: float
    label: str
    kind: Literal["plain", "bad"] = "plain"


@dataclass(frozen=True)
class Across:
    """The x axis. Charts of the same `name` and `ends` are zoomed together. `ends`: None for those of the data; `base`: of a
    logarithmic one; `ticks`: where its labels are, None for round numbers."""

    name: str = ""
    form: Form = "whole"
    kind: Literal["value", "log", "time"] = "value"
    ends: tuple[float, float] | None = None
    base: int = 10
    ticks: Sequence[float] | None = None


@dataclass(frozen=True)
class Axis:
    """An axis of parallel coordinates: `values` [N], all finite; for text, indices into `words`. `log`: logarithmic, all above 0.
    `ticks`: where its labels are, if it has few values."""

    name: str
    values: Array
    log: bool = False
    words: Sequence[str] = ()
    ticks: Sequence[float] = ()


@dataclass(frozen=True)
class Grid:
    """values [R, C]; NaN is an empty cell. Row 0 is on top; `rows` [R] and `columns` [C] are their names. `limits`: values of the
    scale's ends. `named`: (row, column, label) of cells with a frame and a label."""

    values: Array
    rows: Sequence[str]
    columns: Sequence[str]
    limits: tuple[float, float]
    form: Form = "number"
    scale: Literal["even", "middle"] = "even"
    named: Sequence[tuple[int, int, str]] = field(default=())


def lines(
    title: str,
    series: Sequence[Series],
    across: Across,
    *,
    unit: str = "",
    about: str = "",
    log: bool = False,
    marks: Sequence[Mark] = (),
    behind: Sequence[Series] = (),
) -> Markup:
    """A figure of lines and points. `about`: a description for screen readers. `log`: logarithmic y at first; the reader may change
    it. `behind`: drawn below the others, without a colour, a name, or values under the pointer.
    """
    known = [one.x for one in (*behind, *series) if len(one.x)]
    low, high = across.ends or ((min(x[0] for x in known), max(x[-1] for x in known)) if known else (0.0, 1.0))
    low, high = (low - 0.5, high + 0.5) if low == high else (low, high)
    data = {
        "kind": "lines",
        "log": log,
        "x": _across(across, (low, high)),
        "series": [_series(one, (low, high)) for one in series],
        "behind": [_series(one, (low, high)) for one in behind],
        "marks": [_mark(one) for one in marks if low <= one.x <= high],
    }
    words = [about or title, *(_described(one, across.name) for one in series)]
    return _figure(title, unit, HEIGHT, data, ". ".join(words))


def heat(
    title: str,
    grid: Grid,
    across: Across,
    *,
    unit: str = "",
    y_name: str = "",
    about: str = "",
    marks: Sequence[Mark] = (),
) -> Markup:
    """A heat map. `across`: its `ends` are those of the grid, in the unit of `marks`; without ticks (an empty list) the columns'
    names are below the grid."""
    known = grid.values[np.isfinite(grid.values)]
    tall = float(np.clip(300.0 / max(len(grid.rows), 1), 2.0, 26.0)) * len(grid.rows)
    ends = across.ends or (0.0, float(len(grid.columns)))
    values = np.where(np.isfinite(grid.values), grid.values, np.nan)
    data = {
        "kind": "heat",
        "form": grid.form,
        "scale": grid.scale,
        "limits": grid.limits,
        "x": _across(across, ends),
        "y": y_name,
        "rows": grid.rows,
        "columns": grid.columns,
        "values": [[_number(value, 5) for value in row] for row in values.tolist()],
        "named": grid.named,
        "marks": [_mark(one) for one in marks if ends[0] <= one.x <= ends[1]],
    }
    words = f"{about or title}. {len(grid.rows)} rows, {len(grid.columns)} columns"
    spread = (
        f", values from {_spoken(known.min(), grid.form)} to {_spoken(known.max(), grid.form)}" if len(known) else ""
    )
    return _figure(title, unit, round(tall) + 106, data, words + spread)


def parallel(
    title: str, axes: Sequence[Axis], names: Sequence[str], *, best: int | None = None, about: str = ""
) -> Markup:
    """A figure of parallel coordinates: one axis per column, one line per row in the colour of its last value. `names` [N]: the
    rows' names, shown under the pointer; row `best` is drawn thick, in the colour of text. Narrow screens scroll it."""
    data = {
        "kind": "parallel",
        "axes": [
            {
                "name": axis.name,
                "kind": "category" if axis.words else "log" if axis.log else "value",
                "words": axis.words,
                "ticks": [_number(tick) for tick in axis.ticks],
            }
            for axis in axes
        ],
        "rows": [[_number(float(value)) for value in row] for row in np.stack([axis.values for axis in axes], axis=1)],
        "names": names,
        "best": best,
    }
    words = about or title
    if best is not None:
        words += f". Best: {names[best]}"
    return _figure(title, "", 330, data, words, "chart parallel")


def wants_log(values: Array) -> bool:
    """Whether the values span so many powers of ten that a linear scale would hide most of them."""
    known = values[np.isfinite(values) & (values > 0)]
    return bool(len(known) and known.max() > 100 * np.median(known))


def clock(seconds: float) -> str:
    """`45 s`, `3:20`, `2:05:00`, `3d 4:00`: a duration."""
    total = round(seconds)
    if total < 60:
        return f"{seconds:.3g} s" if total else "0"
    days, rest = divmod(total, 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    if days:
        return f"{days}d {hours}:{minutes:02d}" if hours or minutes else f"{days}d"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def reduced(x: Array, y: Array, ends: tuple[float, float]) -> tuple[list[int | float | None], list[int | float | None]]:
    """The points that are sent, with None in y where values are missing in between."""
    finite = np.isfinite(y)
    gaps = np.cumsum(~finite)[finite]  # number of gaps before each point
    x, y = x[finite], y[finite]
    at = np.arange(len(x))
    if len(x) > 4 * COLUMNS:
        column = np.floor((x - ends[0]) / (ends[1] - ends[0]) * COLUMNS).astype(int)
        starts = np.flatnonzero(np.append(True, column[1:] != column[:-1]))
        stops = np.append(starts[1:], len(x)) - 1
        order = np.lexsort((y, column))
        at = np.unique(np.concatenate([starts, stops, order[starts], order[stops]]))
    xs: list[int | float | None] = []
    ys: list[int | float | None] = []
    for i, j in enumerate(at.tolist()):
        if i and gaps[j] != gaps[at[i - 1]]:
            xs.append(xs[-1])
            ys.append(None)
        xs.append(_number(float(x[j]), 12))
        ys.append(_number(float(y[j])))
    return xs, ys


def _series(series: Series, ends: tuple[float, float]) -> dict[str, Any]:
    x, y = reduced(series.x, series.y, ends)
    lone = "dots" if len(x) == 1 else series.style  # a line of one point would be hardly visible
    return {"name": series.name, "style": lone, "x": x, "y": y, **({"labels": series.labels} if series.labels else {})}


def _across(across: Across, ends: tuple[float, float]) -> dict[str, Any]:
    ticks = None if across.ticks is None else [_number(float(tick), 12) for tick in across.ticks]
    made = {"name": across.name, "form": across.form, "kind": across.kind, "ends": [_number(end, 12) for end in ends]}
    return {**made, "base": across.base, "ticks": ticks}


def _mark(mark: Mark) -> list[Any]:
    return [_number(float(mark.x), 12), mark.label, mark.kind == "bad"]


def _number(value: float, digits: int = _DIGITS) -> int | float | None:
    """As it is written: without superfluous digits. None if it is not finite."""
    if not np.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded


def _described(series: Series, x_name: str) -> str:
    """A line in words."""
    known = np.isfinite(series.y)
    x, y = series.x[known], series.y[known]
    if not len(x):
        return f"{series.name}: no values".removeprefix(": ")
    ends = f"from {y[0]:.6g} at {x_name} {x[0]:g} to {y[-1]:.6g} at {x_name} {x[-1]:g}".replace("  ", " ")
    return f"{series.name}: {len(x):,} values, {ends}, lowest {y.min():.6g}, highest {y.max():.6g}".removeprefix(": ")


def _spoken(value: float, form: Form) -> str:
    if form == "percent":
        return f"{value:.0%}"
    if form == "mib":
        return f"{value:,.0f} MiB"
    return f"{2**value:.2f} times" if form == "power" else f"{value:.6g}"


def _figure(title: str, unit: str, height: int, data: dict[str, Any], words: str, look: str = "chart") -> Markup:
    # Secrets are removed before the characters that could be markup are hidden.
    text = json.dumps(redact(data), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    text = text.replace("&", "\\u0026").replace("<", "\\u003c")
    plot = tag(
        "div", tag("p", words), class_="plot", role="img", aria_label=f"{title}: {words}", style=f"height:{height}px"
    )
    return tag(
        "figure",
        tag("figcaption", title, tag("span", f" {unit}", class_="unit") if unit else None),
        tag("div", plot, class_="wide", tabindex="0") if look != "chart" else plot,
        tag("script", Markup(text), type="application/json"),
        class_=look,
        data_name=title,
    )
