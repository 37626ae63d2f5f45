"""The pages' figures: escaped text, and charts whose data has the important points of any amount of data."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from raydist.report.html import bars, charts, page, style
from raydist.report.html.charts import Across, Mark, Series
from raydist.report.html.elements import Markup, tag


def parsed(figure: Markup) -> ElementTree.Element:
    """Parses it; fails if it is not well-formed, as with unescaped text."""
    return ElementTree.fromstring(figure)


def told(figure: Markup) -> dict[str, Any]:
    """The data for chart.js."""
    return dict(json.loads(parsed(figure).findtext("script") or ""))


def spoken(figure: Markup) -> str:
    """The figure in words."""
    (plot,) = [one for one in parsed(figure).iter("div") if one.get("class") == "plot"]
    assert plot.get("aria-label", "").endswith(plot.findtext("p") or "-")
    return plot.get("aria-label", "")


def drawn(y: list[float], **more: Any) -> dict[str, Any]:
    """The data of a chart with one series."""
    return dict(
        told(charts.lines("x", [Series("", np.arange(float(len(y))), np.array(y))], Across(), **more))["series"][0]
    )


def test_the_library_is_the_one_that_the_record_names() -> None:
    """Its bytes have the hash that docs/adr/0022-live-pages.md gives, and it can stand inside a page."""
    root = Path(__file__).parents[3]
    record = (root / "docs" / "adr" / "0022-live-pages.md").read_text()
    assert hashlib.sha256(page.library().encode()).hexdigest() in record
    versions = re.findall(r"(echarts|esbuild)@([\d.]+)", (root / "Makefile").read_text())
    assert [name for name, _ in versions] == ["echarts", "esbuild"]
    assert all(version in record for _, version in versions)
    whole = f"{page.library()}\n{page.script()}"
    assert whole.isascii(), "its hash does not depend on the encoding of a notebook"
    made = page.page("").decode()
    (packed,) = re.findall(r'const packed = "([\w+/=]+)";', made)
    assert gzip.decompress(base64.b64decode(packed)).decode() == whole
    assert base64.b64encode(hashlib.sha256(whole.encode()).digest()).decode() in made, "its policy allows it"
    assert len(made) < 360_000


def test_text_is_escaped() -> None:
    """It is escaped in elements and attributes, except for text that is markup already."""
    evil = "<script>\"&'"
    made = tag("p", evil, tag("b", 3), None, [evil, "x"], title=evil, data_x=1.5, hidden=True, id=None)
    element = ElementTree.fromstring(made.replace(" hidden", ""))
    assert "".join(element.itertext()) == f"{evil}3{evil}x"
    assert element.attrib == {"title": evil, "data-x": "1.5"}
    assert "<script>" not in made
    assert " hidden>" in made


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0"), (45, "45 s"), (200, "3:20"), (7500, "2:05:00"), (86_400, "1d"), (273_600, "3d 4:00")],
)
def test_times_since_a_start(seconds: float, said: str) -> None:
    """Times as in a table."""
    assert charts.clock(seconds) == said


def test_one_odd_point_among_a_million_is_drawn() -> None:
    """It is in the data at its own step, in at most 100 kB; the minimum and maximum of the other points are kept."""
    x = np.arange(1.0, 1e6 + 1)
    y = np.where(x % 2 == 0, 1.0, 2.0)
    y[612_345] = 50.0
    figure = charts.lines("Loss", [Series("", x, y)], Across("step"))
    assert len(figure) < 100_000
    made = told(figure)["series"][0]
    assert made["y"][made["x"].index(612_346)] == 50
    assert set(made["y"]) == {1, 2, 50}
    assert (made["x"][0], made["x"][-1], made["x"] == sorted(made["x"])) == (1, 1_000_000, True)
    assert "1,000,000 values, from 2 at step 1 to 1 at step 1e+06, lowest 1, highest 50" in spoken(figure)


def test_few_points_are_all_kept() -> None:
    """Up to four for each column: every step of a short run is under the pointer."""
    y = np.random.default_rng(0).random(4 * charts.COLUMNS)
    assert drawn(y.tolist())["y"] == [float(f"{one:.7g}") for one in y]


def test_a_line_breaks_where_a_number_is_missing() -> None:
    """There is a null between the points on both sides of a gap, and none at the ends."""
    made = drawn([math.nan, 1.0, 2.0, math.nan, 3.0, math.inf, 4.0, math.inf])
    assert made == {"name": "", "style": "line", "x": [1, 2, 2, 4, 4, 6], "y": [1, 2, None, 3, None, 4]}


@pytest.mark.parametrize("y", [[], [3.0], [0.0, 0.0], [math.nan], [-1.0, -1.0]])
@pytest.mark.parametrize("log", [False, True])
def test_little_is_drawn_too(y: list[float], log: bool) -> None:
    """For no data, one point or a constant, the data is valid, and the x axis has a length."""
    series = [Series("a", np.arange(float(len(y))), np.array(y)), Series("b", np.zeros(0), np.zeros(0))]
    figure = charts.lines("x", series, Across(), log=log)
    low, high = told(figure)["x"]["ends"]
    assert low < high
    assert "NaN" not in figure
    assert ("no values" in spoken(figure), told(figure)["log"]) == (True, log)


def test_powers() -> None:
    """A logarithmic axis is chosen if the maximum is over 100 times the median."""
    assert charts.wants_log(np.array([1.0, 1.0, 500.0]))
    assert not charts.wants_log(np.array([1.0, 2.0, 50.0]))


def test_a_chart_says_what_it_is() -> None:
    """Title, description, series and marks are present and escaped; marks outside are left out."""
    evil = '</script><script>&\u2028"'
    series = [Series(evil, np.arange(3.0), np.arange(3.0)), Series("eval", np.array([1.0]), np.array([1.0]), "dots")]
    marks = [Mark(1.0, evil, "bad"), Mark(99.0, "outside")]
    figure = charts.lines(evil, series, Across(evil), about=evil, unit=evil, marks=marks)
    assert figure.count("<script") == figure.count("</script") == 1
    assert "".join(parsed(figure).find("figcaption").itertext()) == f"{evil} {evil}"  # type: ignore[union-attr]
    assert f"{evil}: 3 values, from 0 at {evil} 0 to 2 at {evil} 2" in spoken(figure)
    assert parsed(figure).get("data-name") == evil
    made = told(figure)
    assert (made["x"]["name"], made["marks"]) == (evil, [[1, evil, True]])
    assert [(one["name"], one["style"]) for one in made["series"]] == [(evil, "line"), ("eval", "dots")]


def test_secrets_do_not_leave_with_the_data() -> None:
    """Neither a password in a URI nor an option with a secret."""
    x = np.arange(2.0)
    figure = charts.lines("x", [Series("s3://KEY:SECRET@bucket/x?a=1&token=T0KEN", x, x)], Across())
    assert told(figure)["series"][0]["name"] == "s3://bucket/x?a=1"


def test_what_lies_behind() -> None:
    """It widens the axis, and is not in the words."""
    x = np.arange(3.0)
    behind = [Series("pale", np.array([0.0, 8.0]), np.array([9.0, 9.0]), "faint")]
    figure = charts.lines("x", [Series("a", x, x, "dots", ["1", "", ""])], Across(), behind=behind)
    made = told(figure)
    assert (made["x"]["ends"], made["behind"][0]["y"], made["series"][0]["labels"]) == ([0, 8], [9, 9], ["1", "", ""])
    assert "pale" not in spoken(figure)


def test_a_large_grid_stays_small() -> None:
    """125 rows of 200 different cells take less than 250 kB, and fit on the screen; unknown cells are null."""
    values = np.random.default_rng(0).random((125, 200))
    values[3, 4], values[3, 5] = math.nan, math.inf
    grid = charts.Grid(values, [str(i) for i in range(125)], [str(i) for i in range(200)], (0.0, 1.0), "percent")
    figure = charts.heat(
        "Heat", grid, Across("time", "clock", "time", (0.0, 60.0)), y_name="rank", marks=[Mark(61.0, "late")]
    )
    assert len(figure) < 250_000
    assert re.findall(r"height:(\d+)px", figure) == ["406"]
    made = told(figure)
    assert (made["values"][3][4], made["values"][3][5], made["marks"]) == (None, None, [])
    assert made["values"][0][0] == pytest.approx(values[0, 0], rel=1e-4)
    assert "125 rows, 200 columns, values from 0% to 100%" in spoken(figure)


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

    scales = {
        name: [light(one) for one in found.split()] for name, found in re.findall(r"--(even|thin):([#\w ]+)", style.CSS)
    }
    assert [*scales] == ["thin", "even"]
    assert all(scale == sorted(scale) for scale in scales.values())
    for mode, found in zip(("light", "dark"), re.findall(r"--middle:([#\w ]+)", style.CSS), strict=True):
        middle = [light(one) for one in found.split()]
        for side in (middle[2::-1], middle[2:]):
            assert side == sorted(side, reverse=mode == "light")
    assert [len(found.split()) for found in re.findall(r"--series:([#\w ]+)", style.CSS)] == [charts.SERIES] * 2
