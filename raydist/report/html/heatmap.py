"""Heat maps: a grid of cells in the colours of a scale, with the scale below, and values under the pointer.

Runs anywhere. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from raydist.report.html import colours
from raydist.report.html.axes import Form, Scale
from raydist.report.html.lines import CHAR, LEFT, RIGHT, WIDTH, Mark, mark_lines, shortened, x_tick
from raydist.report.html.svg import Markup, number, tag

TOP = 20.0
_HEIGHTS = (8.0, 26.0)
"""Maximum height of a row, with many rows and with few."""
_TALLEST = 300.0


def chart(
    title: str,
    values: NDArray[np.float64],
    *,
    limits: tuple[float, float],
    edges: tuple[float, float],
    x_ticks: Sequence[float],
    x_form: Form,
    rows: Sequence[str],
    columns: Sequence[str],
    form: Form,
    legend: Sequence[tuple[float, str]],
    scale: Literal["even", "middle"] = "even",
    unit: str = "",
    x_name: str = "",
    y_name: str = "",
    about: str = "",
    marks: Sequence[Mark] = (),
    named: Sequence[tuple[int, int, str]] = (),
) -> Markup:
    """A figure of values [R, C]; NaN is an empty cell. Row 0 is on top; `rows` [R] and `columns` [C] are their names.

    `edges`: x of the grid's ends, in the unit of `x_ticks` and `marks`. `limits`: values of the scale's ends. `legend`: values to
    mark on the scale, with labels. `form` formats a value, without `|`. `scale`: even, or with a colourless `middle`.
    `named`: (row, column, label) of cells with a frame and a label.
    """
    count, wide = values.shape
    height = min(_HEIGHTS[1], max(_TALLEST / count, 2.0)) if count < 40 else max(2.0, _TALLEST / count)
    bottom = TOP + height * count
    left = max(LEFT, 9 + CHAR * max(len(shortened(row)) for row in rows))
    across = Scale(*edges, left, RIGHT)
    size = (RIGHT - left) / wide, height
    letter = "v" if scale == "even" else "d"
    levels = np.full(values.shape, -1)
    known = np.isfinite(values)
    share = (values[known] - limits[0]) / ((limits[1] - limits[0]) or 1.0)
    levels[known] = np.clip(np.rint(share * (colours.LEVELS - 1)), 0, colours.LEVELS - 1)
    every = -(-count // 24) if height >= 10 else -(-count // 12)
    drawing = tag(
        "svg",
        tag("title", title),
        tag("desc", about or title),
        tag("rect", class_="empty", x=left, y=TOP, width=RIGHT - left, height=bottom - TOP),
        tag(
            "g",
            [tag("path", class_=f"{letter}{level}", d=path) for level, path in _paths(levels)],
            class_="cells",
            transform=f"translate({left:g} {TOP:g}) scale({size[0]:.5f} {height:.4f})",
        ),
        [
            tag("text", shortened(rows[i]), x=left - 7, y=TOP + height * (i + 0.5) + 4, text_anchor="end")
            for i in range(0, count, every)
        ],
        [x_tick(tick, across, x_form, bottom) for tick in x_ticks],
        tag("text", y_name, class_="name", x=0, y=TOP - 8),
        tag("text", x_name, class_="name", x=RIGHT, y=bottom + 38, text_anchor="end"),
        [_name(word, left + size[0] * j, TOP + height * i, *size) for i, j, word in named],
        mark_lines(marks, across, TOP, bottom, CHAR * len(y_name) + 8),
        _legend(letter, limits, legend, left, bottom + 30),
        tag("path", class_="cross", d=""),
        viewBox=f"0 0 {WIDTH:g} {number(round(bottom + 58, 1))}",
        role="img",
        data_cells=_hover(values, form, [f"{y_name} {row}".strip() for row in rows], columns, left, bottom),
    )
    head = tag("figcaption", title, tag("span", f" {unit}", class_="unit"))
    return tag("figure", head, drawing, class_="chart")


def _paths(levels: NDArray[np.int64]) -> list[tuple[int, str]]:
    """(level, path) of each level in use, in units of cells; adjacent cells of one level in a row are one piece."""
    pieces: dict[int, list[str]] = {}
    for i, row in enumerate(levels):
        starts = np.flatnonzero(np.append(True, row[1:] != row[:-1]))
        for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(row)], strict=True):
            if row[start] >= 0:
                pieces.setdefault(int(row[start]), []).append(f"M{start} {i}h{stop - start}v1h{start - stop}z")
    return [(level, "".join(found)) for level, found in sorted(pieces.items())]


def _name(word: str, x: float, y: float, wide: float, tall: float) -> list[Markup]:
    box = {"x": round(x + 1, 1), "y": round(y + 1, 1), "width": wide - 2, "height": max(tall - 2, 1.0)}
    # White on black: one of the two is visible on any colour of the scale.
    frame = [tag("rect", class_=f"frame {look}".strip(), **box) for look in ("behind", "")]
    place = {"x": round(x + wide / 2, 1), "y": round(y + tall / 2 + 4, 1), "text_anchor": "middle"}
    return [*frame, *([tag("text", word, class_="label", **place)] if wide > CHAR * len(word) and tall > 14 else [])]


def _legend(
    letter: str, limits: tuple[float, float], words: Sequence[tuple[float, str]], left: float, y: float
) -> list[Markup]:
    wide = 200.0 / colours.LEVELS
    scale = Scale(*limits, left, left + 200.0)
    bar = [
        tag("rect", class_=f"{letter}{i}", x=left + i * wide, y=y, width=wide + 0.3, height=8.0)
        for i in range(colours.LEVELS)
    ]
    return [
        *bar,
        *(tag("text", word, x=round(float(scale(value)), 1), y=y + 22, text_anchor="middle") for value, word in words),
    ]


def _hover(
    values: NDArray[np.float64], form: Form, rows: Sequence[str], columns: Sequence[str], left: float, bottom: float
) -> str:
    # One string per row: in an attribute each quotation mark takes six characters.
    texts = ["|".join("" if value != value else form(value) for value in row) for row in values.tolist()]
    data = {
        "box": [round(left, 1), TOP, RIGHT, round(bottom, 1)],
        "rows": list(rows),
        "columns": list(columns),
        "values": texts,
    }
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False)
