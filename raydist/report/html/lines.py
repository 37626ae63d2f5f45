"""Charts of lines and points: axes with round ticks, several series, a legend, marks, values under the pointer.

Runs anywhere. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from raydist.report.html import axes, colours
from raydist.report.html.axes import Form, Scale
from raydist.report.html.svg import Markup, number, tag

WIDTH, HEIGHT = 600.0, 236.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 588.0, 18.0, 190.0
"""Edges of the plot within the drawing."""
CHAR = 9.6
"""Maximum width of a character in units of the drawing: on a phone, where text is larger."""
_MOST = 20
"""Maximum length of a label beside an axis."""
COLUMNS = int(RIGHT - LEFT)
"""About one pixel each: of the points in a column only the first, the lowest, the highest and the last are drawn."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """x [N] ascending, y [N]; NaN interrupts the line. `style`: a line, a thin pale line, or points."""

    name: str
    x: Array
    y: Array
    style: Literal["line", "faint", "dots"] = "line"


@dataclass(frozen=True)
class Mark:
    """A vertical line at x, with a label on top; `kind`: its style."""

    x: float
    label: str
    kind: Literal["plain", "bad"] = "plain"


@dataclass(frozen=True)
class Label:
    """A label above a point, to its right."""

    x: float
    y: float
    text: str


def chart(
    title: str,
    series: Sequence[Series],
    *,
    unit: str = "",
    x_name: str = "",
    about: str = "",
    log: bool = False,
    form: Form = axes.short,
    x_form: Form = axes.whole,
    x_tick_form: Form = axes.short,
    x_ticks: Sequence[float] | None = None,
    marks: Sequence[Mark] = (),
    behind: Sequence[Series] = (),
    labels: Sequence[Label] = (),
) -> Markup:
    """A figure. `about`: a description for screen readers. `log`: logarithmic y; values that are not above 0 are left out.
    `behind`: drawn below the others, without a colour, a name, or values under the pointer.

    Each column keeps its minimum and its maximum, so a single outlier among a million points stays visible.
    """
    y_low, y_high = axes.spread([one.y for one in (*behind, *series)], log)
    known = [one.x for one in (*behind, *series) if len(one.x)]
    low, high = (min(x[0] for x in known), max(x[-1] for x in known)) if known else (0.0, 1.0)
    low, high = (low - 0.5, high + 0.5) if low == high else (low, high)
    across, up = Scale(low, high, LEFT, RIGHT), Scale(y_low, y_high, BOTTOM, TOP, log)
    shown = [_Shown(one, across, up) for one in series]
    steps = axes.log_ticks(y_low, y_high) if log else axes.ticks(y_low, y_high)
    drawing = tag(
        "svg",
        tag("title", title),
        tag("desc", about or title),
        [_y_tick(tick, up, form) for tick in steps],
        [x_tick(tick, across, x_tick_form) for tick in (axes.whole_ticks(low, high) if x_ticks is None else x_ticks)],
        tag("text", x_name, class_="name", x=RIGHT, y=HEIGHT - 6, text_anchor="end"),
        mark_lines(marks, across),
        [_Shown(one, across, up).drawn("behind") for one in behind],
        [one.drawn(f"s{i % colours.SERIES}") for i, one in enumerate(shown)],
        _labels(labels, across, up),
        tag("path", class_="cross", d=""),
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        role="img",
        data_lines=_hover(shown, (low, high), x_form, form, x_name),
    )
    head = tag("figcaption", title, tag("span", f" {unit}{', log scale' if log else ''}", class_="unit"))
    names = [
        tag("span", tag("i", class_=f"swatch s{i % colours.SERIES} {one.style}"), one.name)
        for i, one in enumerate(series)
        if one.name
    ]
    return tag("figure", head, tag("div", names, class_="legend") if len(names) > 1 else None, drawing, class_="chart")


def wants_log(values: Array) -> bool:
    """Whether the values span so many powers of ten that a linear scale would hide most of them."""
    known = values[np.isfinite(values) & (values > 0)]
    return bool(len(known) and known.max() > 100 * np.median(known))


def inside(x: float, text: str, width: float = WIDTH) -> tuple[float, str]:
    """(x, text-anchor) of a text centred at x, moved if the drawing's left or right edge would cut it off."""
    half = CHAR * len(text) / 2
    if x - half < 0:
        return 0.0, "start"
    return (width, "end") if x + half > width else (round(x, 1), "middle")


def shortened(text: str) -> str:
    """The text, shortened to fit beside an axis."""
    return text if len(text) <= _MOST else f"{text[: _MOST - 1]}…"


def mark_lines(
    marks: Sequence[Mark], across: Scale, top: float = TOP, bottom: float = BOTTOM, free: float = LEFT
) -> list[Markup]:
    """Vertical lines, each with its label if the previous label leaves room. `free`: smallest x of the first label."""
    drawn = []
    for mark in sorted(marks, key=lambda m: m.x):
        x = float(across(mark.x))
        if not LEFT - 1 <= x <= RIGHT + 1:
            continue
        drawn.append(tag("path", class_=f"mark {mark.kind}", d=f"M{number(round(x, 1))} {top - 4:g}V{bottom:g}"))
        if x >= free and x < WIDTH - CHAR * len(mark.label):
            drawn.append(tag("text", mark.label, class_=f"mark {mark.kind}", x=round(x + 3, 1), y=top - 6))
            free = x + CHAR * len(mark.label) + 8
    return drawn


def x_tick(tick: float, across: Scale, form: Form, bottom: float = BOTTOM) -> list[Markup]:
    """A tick below the plot."""
    x = round(float(across(tick)), 1)
    at, anchor = inside(x, form(tick))
    return [
        tag("path", class_="tick", d=f"M{number(x)} {bottom:g}v4"),
        tag("text", form(tick), x=at, y=bottom + 17, text_anchor=anchor),
    ]


def _labels(labels: Sequence[Label], across: Scale, up: Scale) -> list[Markup]:
    """Each label, if the previous one leaves room."""
    drawn: list[Markup] = []
    free, last = -np.inf, -np.inf
    for label in sorted(labels, key=lambda one: one.x):
        x, y = float(across(label.x)) + 4, float(up(label.y)) - 5
        if x >= free or abs(y - last) >= 12:
            drawn.append(tag("text", label.text, class_="label", x=round(x, 1), y=round(y, 1)))
            free, last = x + 9.0 * len(label.text), y
    return drawn


def _y_tick(tick: float, up: Scale, form: Form) -> list[Markup]:
    y = round(float(up(tick)), 1)
    return [
        tag("path", class_="grid", d=f"M{LEFT:g} {number(y)}H{RIGHT:g}"),
        tag("text", form(tick), x=LEFT - 7, y=y + 4, text_anchor="end"),
    ]


class _Shown:
    """A series as it is drawn: its finite points, and the column of each."""

    def __init__(self, series: Series, across: Scale, up: Scale) -> None:
        finite = np.isfinite(series.y) & ((series.y > 0) | (not up.log))
        self.series = series
        self.gaps = np.cumsum(~finite)[finite]  # number of gaps before each point
        self.x, self.y = series.x[finite], series.y[finite]
        self.px, self.py = across(self.x), up(self.y)
        self.column = np.floor(self.px - LEFT).astype(int)
        self.starts = np.flatnonzero(_first(self.column))
        self.ends = (np.append(self.starts[1:], len(self.x)) - 1)[: len(self.starts)]

    def vertices(self) -> NDArray[np.int64]:
        """Indices, ascending, of the first, the lowest, the highest and the last point of each column."""
        order = np.lexsort((self.y, self.column))
        return np.unique(np.concatenate([self.starts, self.ends, order[self.starts], order[self.ends]]))

    def drawn(self, colour: str) -> Markup:
        at = self.vertices()
        style = "dots" if len(at) == 1 else self.series.style  # a line of one point would be hardly visible
        if style == "dots":
            path = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in zip(self.px[at], self.py[at], strict=True))
        else:
            new = _first(self.gaps[at])
            alone = new & np.append(new[1:], True)[: len(at)]
            path = "".join(
                f"{'M' if begins else 'L'}{x:.1f} {y:.1f}{'h0' if lone else ''}"
                for begins, lone, x, y in zip(new, alone, self.px[at], self.py[at], strict=True)
            )
        return tag("path", class_=f"line {colour} {style}", d=path)


def _first(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Where a value differs from the previous one; True for the first value."""
    return np.append(True, values[1:] != values[:-1])[: len(values)]


def _hover(shown: Sequence[_Shown], ends: tuple[float, float], x_form: Form, form: Form, x_name: str) -> str:
    """JSON for the script: the ends of the x axis, the position of each column, its x, and the values of each series."""
    columns: dict[int, list[float]] = {}
    texts: list[dict[int, str]] = []
    for one in shown:
        values: dict[int, str] = {}
        for start, end in zip(one.starts.tolist(), one.ends.tolist(), strict=True):
            part = one.y[start : end + 1]
            low, high = form(float(part.min())), form(float(part.max()))
            values[int(one.column[start])] = low if low == high else f"{low} to {high}"
            seen = columns.setdefault(int(one.column[start]), [np.inf, -np.inf, 0.0])
            seen[0], seen[1] = min(seen[0], float(one.x[start])), max(seen[1], float(one.x[end]))
            seen[2] = float(one.px[start] + one.px[end]) / 2
        texts.append(values)
    order = sorted(columns)
    labels = [(x_form(columns[c][0]), x_form(columns[c][1])) for c in order]
    data = {
        "box": [LEFT, TOP, RIGHT, BOTTOM],
        "ends": ends,
        "of": x_name,
        "x": [round(columns[c][2], 1) for c in order],
        "at": [f"{x_name} {first if first == last else f'{first} to {last}'}".strip() for first, last in labels],
        "series": [
            {"name": s.series.name, "values": [v.get(c, "") for c in order]} for s, v in zip(shown, texts, strict=True)
        ],
    }
    return json.dumps(data, separators=(",", ":"))
