"""The parts of the pages' charts: round ticks, escaped text, and charts that show the important points of any amount of data."""

from __future__ import annotations

import html
import json
import math
import re
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from raydist.report.html import axes, bars, colours, heatmap, lines
from raydist.report.html.lines import Mark, Series
from raydist.report.html.elements import Markup, number, tag


def parsed(figure: Markup) -> ElementTree.Element:
    """Parses it; fails if it is not well-formed, as with unescaped text."""
    return ElementTree.fromstring(figure)


def points(figure: Markup, index: int = 0) -> list[tuple[str, float, float]]:
    """(M or L, x, y) of a series' path."""
    path = next(p for p in parsed(figure).iter("path") if p.get("class", "").startswith(f"line s{index}"))
    return [(a, float(x), float(y)) for a, x, y in re.findall(r"([ML])([\d.]+) ([\d.]+)", path.get("d", ""))]


def told(figure: Markup, name: str) -> dict[str, Any]:
    """The data for the page's script."""
    return json.loads(next(v for v in (svg.get(f"data-{name}") for svg in parsed(figure).iter("svg")) if v))


def test_text_is_escaped() -> None:
    """It is escaped in elements and attributes, except for text that is markup already."""
    evil = "<script>\"&'"
    made = tag("p", evil, tag("b", 3), None, [evil, "x"], title=evil, data_x=1.5, hidden=True, id=None)
    element = ElementTree.fromstring(made.replace(" hidden", ""))
    assert "".join(element.itertext()) == f"{evil}3{evil}x"
    assert element.attrib == {"title": evil, "data-x": "1.5"}
    assert "<script>" not in made
    assert " hidden>" in made


@pytest.mark.parametrize(("value", "said"), [(3.0, "3"), (0.125, "0.12"), (-1.5, "-1.5"), (100.0, "100")])
def test_numbers_in_drawings_are_short(value: float, said: str) -> None:
    """At most two decimals, without trailing zeros."""
    assert number(value) == said


@pytest.mark.parametrize(
    ("ticks", "expected"),
    [
        (axes.ticks(0, 10), [0, 2, 4, 6, 8, 10]),
        (axes.ticks(-0.3, 0.3, 3), [-0.2, 0.0, 0.2]),
        (axes.ticks(0.0, 3e-5, 3), [0.0, 1e-5, 2e-5, 3e-5]),
        (axes.ticks(5, 5), [5]),
        (axes.whole_ticks(1, 3), [1, 2, 3]),
        (axes.whole_ticks(0, 1_000_000, 5), [0, 200_000, 400_000, 600_000, 800_000, 1_000_000]),
        (axes.time_ticks(0, 300), [0, 60, 120, 180, 240, 300]),
        (axes.time_ticks(0, 86_400 * 10), [86_400.0 * n for n in range(0, 11, 2)]),
        (axes.time_ticks(0, 0.5, 5), [0, 0.1, 0.2, 0.3, 0.4, 0.5]),
        (axes.log_ticks(0.5, 2000), [1, 10, 100, 1000]),
        (axes.log_ticks(3, 30), [5, 10, 20]),
    ],
)
def test_ticks_are_round(ticks: list[float], expected: list[float]) -> None:
    """Ticks are round, and between the ends of the axis."""
    assert ticks == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "0"), (1500, "1500"), (15_000, "15k"), (2.5e6, "2.5M"), (1e-3, "0.001"), (2e-5, "2e-5"), (1.25e-4, "1.25e-4"),
     (-0.25, "-0.25")],
)  # fmt: skip
def test_short_numbers(value: float, said: str) -> None:
    """Numbers as on an axis."""
    assert axes.short(value) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0"), (45, "45 s"), (200, "3:20"), (7500, "2:05:00"), (86_400, "1d"), (273_600, "3d 4:00")],
)
def test_times_since_a_start(seconds: float, said: str) -> None:
    """Times as on an axis."""
    assert axes.clock(seconds) == said


def test_one_odd_point_among_a_million_is_drawn() -> None:
    """It has its own height, in at most 200 kB; the minimum and maximum of the other points are kept."""
    x = np.arange(1.0, 1e6 + 1)
    y = np.where(x % 2 == 0, 1.0, 2.0)
    y[612_345] = 50.0
    figure = lines.chart("Loss", [Series("", x, y)])
    assert len(figure) < 200_000
    drawn = points(figure)
    high = min(drawn, key=lambda point: point[2])
    _, top = axes.spread([y], False)
    assert high[2] == pytest.approx(lines.BOTTOM - 50 / top * (lines.BOTTOM - lines.TOP), abs=0.1)
    assert high[1] == pytest.approx(lines.LEFT + 0.612345 * (lines.RIGHT - lines.LEFT), abs=0.5)
    assert [action for action, _, _ in drawn].count("M") == 1
    levels = {round(y, 1) for _, _, y in drawn}
    assert len(levels) == 3, "both levels and the spike, and nothing between them"
    assert "1 to 50" in told(figure, "lines")["series"][0]["values"]


def test_a_line_breaks_where_a_number_is_missing() -> None:
    """A single point between two gaps is drawn as a point."""
    y = np.array([1.0, 2.0, math.nan, 3.0, math.nan, 4.0, math.inf])
    figure = lines.chart("x", [Series("", np.arange(7.0), y)])
    assert [action for action, _, _ in points(figure)] == ["M", "L", "M", "M"]
    assert 'h0"' in figure
    assert told(figure, "lines")["series"][0]["values"] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("y", [[], [3.0], [0.0, 0.0], [math.nan], [-1.0, -1.0]])
@pytest.mark.parametrize("log", [False, True])
def test_little_is_drawn_too(y: list[float], log: bool) -> None:
    """For no data, one point or a constant, the chart has finite coordinates."""
    figure = lines.chart(
        "x", [Series("a", np.arange(float(len(y))), np.array(y)), Series("b", np.zeros(0), np.zeros(0))], log=log
    )
    assert "nan" not in figure
    assert "inf" not in figure
    parsed(figure)


def test_powers() -> None:
    """Equal factors have equal distances; values that are not above 0 are not drawn."""
    figure = lines.chart("x", [Series("", np.arange(4.0), np.array([1.0, 10.0, 100.0, 0.0]))], log=True)
    a, b, c = (y for _, _, y in points(figure))
    assert a - b == pytest.approx(b - c, abs=0.2)
    assert "log scale" in figure
    assert lines.wants_log(np.array([1.0, 1.0, 500.0]))
    assert not lines.wants_log(np.array([1.0, 2.0, 50.0]))


def test_a_chart_says_what_it_is() -> None:
    """Title, description, legend and marks are present and escaped."""
    evil = "</svg><script>"
    series = [Series(evil, np.arange(3.0), np.arange(3.0)), Series("eval", np.array([1.0]), np.array([1.0]), "dots")]
    figure = lines.chart(
        evil, series, about=evil, x_name=evil, unit=evil, marks=[Mark(1.0, evil, "bad"), Mark(99.0, "outside")]
    )
    assert "<script>" not in figure
    assert parsed(figure).findtext(".//desc") == evil
    assert parsed(figure).findtext(".//title") == evil
    assert len([p for p in parsed(figure).iter("path") if p.get("class") == "mark bad"]) == 1
    assert "outside" not in figure
    shown = told(figure, "lines")
    assert shown["series"][0]["name"] == evil
    assert shown["series"][1]["values"] == ["", "1", ""]
    assert [len(part) for part in (shown["x"], shown["at"])] == [3, 3]


def test_labels_and_what_lies_behind() -> None:
    """A label is drawn only if the previous one leaves room. Series behind widen the axes, but have no legend and no hover
    text."""
    x = np.arange(3.0)
    spots = [
        lines.Label(0.0, 0.0, "1"),
        lines.Label(0.01, 0.0, "2"),
        lines.Label(0.02, 2.0, "3"),
        lines.Label(2.0, 2.0, "4"),
    ]
    behind = [Series("pale", np.array([0.0, 8.0]), np.array([9.0, 9.0]), "faint")]
    figure = lines.chart("x", [Series("a", x, x, "dots"), Series("b", x, x)], behind=behind, labels=spots)
    assert [text.text for text in parsed(figure).iter("text") if text.get("class") == "label"] == ["1", "3", "4"]
    assert [path.get("class") for path in parsed(figure).iter("path")].count("line behind faint") == 1
    assert points(figure, 1)[-1][1] == pytest.approx(lines.LEFT + (lines.RIGHT - lines.LEFT) / 4, abs=0.1)
    assert [one["name"] for one in told(figure, "lines")["series"]] == ["a", "b"]
    assert "pale" not in figure


def heat(values: Any, **more: Any) -> Markup:
    """A heat map of rows a, b, ..."""
    grid = np.array(values, dtype=float)
    known = {"limits": (0.0, 1.0), "edges": (0.0, float(grid.shape[1])), "x_ticks": [0.0], "x_form": axes.short, "form": axes.short,
             "legend": [(0.0, "low")], "rows": list("abcdefgh")[: len(grid)],
             "columns": [str(j) for j in range(grid.shape[1])]}  # fmt: skip
    return heatmap.chart("Heat", grid, **{**known, **more})


def test_cells_have_the_colour_of_their_value() -> None:
    """Neighbours of one level are one path; values outside the scale get its end; unknown values have no colour."""
    figure = heat([[0.0, 0.0, 1.0, 7.0], [math.nan, 0.5, -3.0, math.nan]])
    (group,) = [g for g in parsed(figure).iter("g") if g.get("class") == "cells"]
    assert {path.get("class"): path.get("d") for path in group} == {
        "v0": "M0 0h2v1h-2zM2 1h1v1h-1z",
        "v12": "M1 1h1v1h-1z",
        "v24": "M2 0h2v1h-2z",
    }
    assert told(figure, "cells")["values"] == ["0|0|1|7", "|0.5|-3|"]


def test_a_large_grid_stays_small() -> None:
    """125 rows of 200 different cells take less than 600 kB, and fit on the screen."""
    values = np.random.default_rng(0).random((125, 200))
    figure = heat(values, rows=[str(i) for i in range(125)])
    assert len(figure) < 600_000
    svg = next(parsed(figure).iter("svg"))
    assert float(svg.get("viewBox", "").split()[3]) < 400


def test_a_grid_names_its_rows() -> None:
    """Each row has its name beside it, and in the hover text with its kind."""
    figure = heat([[0.0], [1.0]], y_name="rank", scale="middle")
    assert told(figure, "cells")["rows"] == ["rank a", "rank b"]
    texts = [text.text for text in parsed(figure).iter("text")]
    assert [name for name in texts if name in ("a", "b", "rank")] == ["a", "b", "rank"]
    assert 'class="d24"' in figure


def test_parts_of_a_whole() -> None:
    """Widths are shares; a part of 0 is only in the table; names are escaped."""
    parts = [
        bars.Part("<b>", 3.0, "compute", "3 s", "what counts"),
        bars.Part("rest", 1.0, "other", "1 s"),
        bars.Part("none", 0.0, "data", "0 s"),
    ]
    figure = parsed(bars.chart("Time", parts, [(1.0, "compute", "first"), (3.0, "other", "then")]))
    bar, line = figure.findall("div")[:2]
    assert [(span.get("class"), span.get("style")) for span in bar] == [
        ("compute", "flex-grow:0.750000"),
        ("other", "flex-grow:0.250000"),
    ]
    assert bar.get("aria-label") == "Time: <b> 75.0%, rest 25.0%"
    assert [span.get("title") for span in line] == ["first", "then"]
    assert [row.findtext("td") for row in figure.iter("tr")] == ["75.0%", "25.0%", "0.0%"]


def test_colours_can_be_told_apart_without_seeing_hue() -> None:
    """The even scale only gets lighter; the scale with a middle changes in both directions from it, in light and dark mode."""

    def light(colour: str) -> float:
        red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2

    for mode in ("light", "dark"):
        found = dict(re.findall(r"--(\w\d+):(#\w{6})", colours.css(mode)))
        even = [light(found[f"v{i}"]) for i in range(colours.LEVELS)]
        assert even == sorted(even)
        middle = [light(found[f"d{i}"]) for i in range(colours.LEVELS)]
        half = colours.LEVELS // 2
        outwards = [middle[half::-1], middle[half:]]
        for side in outwards:
            assert side == sorted(side, reverse=mode == "light")
    assert html.escape(colours.rules()) == colours.rules()
