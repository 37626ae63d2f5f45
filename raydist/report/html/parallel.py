"""Parallel coordinates: one axis per column, one line per row in the colour of its last value. Narrow screens scroll it.

Runs anywhere. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raydist.report.html import axes, colours, lines
from raydist.report.html.axes import Form, Scale
from raydist.report.html.svg import Markup, number, tag

WIDTH, HEIGHT = 1220.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 70.0, 1130.0, 34.0, 276.0


@dataclass(frozen=True)
class Axis:
    """A column: `values` [N], all finite; for text, indices into `words`. `log`: logarithmic, all above 0.

    `ticks`: the values themselves, if there are few; empty for round numbers.
    """

    name: str
    values: NDArray[np.float64]
    form: Form = axes.short
    log: bool = False
    words: Sequence[str] = ()
    ticks: Sequence[float] = ()


def chart(
    title: str, columns: Sequence[Axis], names: Sequence[str], *, best: int | None = None, about: str = ""
) -> Markup:
    """A figure. `names` [N]: the rows' names, shown under the pointer; the last column sets the colours; row `best` is drawn thick,
    in the colour of text.

    Requires at least two columns and one row.
    """
    places = np.linspace(max(LEFT, 12 + lines.CHAR * _longest(columns[0])), RIGHT, len(columns))
    scales = [_scale(axis) for axis in columns]
    at = np.stack([scale(axis.values) for scale, axis in zip(scales, columns, strict=True)])
    last = columns[-1].values
    low, high = float(last.min()), float(last.max())
    drawn = []
    # The best one is drawn last, so it is on top.
    for i in sorted(range(len(names)), key=lambda i: i == best):
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in zip(places, at[:, i], strict=True))
        colour = "var(--ink)" if i == best else f"var(--l{colours.level(float(last[i]), low, high)})"
        look = f"stroke:{colour};stroke-width:{4 if i == best else 1.4}"
        drawn.append(tag("path", tag("title", names[i]), class_="row", d=path, style=look))
    drawing = tag(
        "svg",
        tag("desc", about or title),
        tag("g", drawn),
        [_axis(axis, scale, float(x)) for axis, scale, x in zip(columns, scales, places, strict=True)],
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        role="img",
        aria_label=title,
    )
    return tag(
        "figure", tag("figcaption", title), tag("div", drawing, class_="wide", tabindex="0"), class_="chart parallel"
    )


def _scale(axis: Axis) -> Scale:
    low, high = float(axis.values.min()), float(axis.values.max())
    if low == high:
        low, high = (low / 2, high * 2) if axis.log else (low - 0.5, high + 0.5)
    return Scale(low, high, BOTTOM, TOP, axis.log)


def _ticks(axis: Axis, scale: Scale) -> list[tuple[float, str]]:
    if axis.words:
        return [(float(i), lines.shortened(word)) for i, word in enumerate(axis.words)]
    found = axes.log_ticks(scale.low, scale.high) if axis.log else axes.ticks(scale.low, scale.high)
    return [(tick, axis.form(tick)) for tick in list(axis.ticks) or found]


def _longest(axis: Axis) -> int:
    """Number of characters of the axis's longest tick."""
    return max((len(word) for _, word in _ticks(axis, _scale(axis))), default=0)


def _axis(axis: Axis, scale: Scale, x: float) -> list[Markup]:
    ticks = _ticks(axis, scale)
    heights = [(round(float(scale(tick)), 1), word) for tick, word in ticks]
    # The last axis has its labels on the outside, where no line crosses them.
    side, anchor = (7, "start") if x >= RIGHT else (-7, "end")
    name_x, name_anchor = lines.inside(x, axis.name, WIDTH)
    return [
        tag("path", class_="tick", d=f"M{number(round(x, 1))} {TOP:g}V{BOTTOM:g}"),
        tag("text", axis.name, class_="name", x=name_x, y=TOP - 16, text_anchor=name_anchor),
        *(tag("path", class_="tick", d=f"M{number(round(x, 1))} {number(y)}h{side // 2}") for y, _ in heights),
        *(tag("text", word, x=round(x + side, 1), y=y + 4, text_anchor=anchor) for y, word in heights),
    ]
