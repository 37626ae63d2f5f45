"""The page of `raydist report` in a real browser: it has all documented parts, works in all display modes, and sends no
request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raydist.report.html import charts, page
from raydist.report.html.run import render
from raydist.report.run_metrics import report
from raydist.run.directory import SPEC, RunDir
from tests.dashboard import accessibility
from tests.report import story
from tests.report.html import looks
from tests.report.html.chromium import Chromium
from tests.report.html.looks import CHART, LOSS, drag, place, zooms
from tests.report.story import GIB

NAME = "<img src=x onerror=owned=1>"
"""HTML as the name of a run: if any text became HTML, it would set `owned`."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """One browser for all tests here."""
    with Chromium(tmp_path_factory.mktemp("chromium")) as made:
        yield made


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the run of story.py."""
    folder = tmp_path_factory.mktemp("report")
    run = story.story(RunDir(folder / NAME))
    run.storage.write(SPEC, f"name: x\ntrain: {{steps: 200, global_batch: 16}}\nnote: '{NAME}'\n".encode())
    path = folder / "report.html"
    path.write_bytes(render(report(run)))
    return path


def texts(browser: Chromium, selector: str) -> list[str]:
    """The visible text of each element."""
    return list(browser.value(f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.innerText)"))


def test_the_page_is_whole_and_asks_for_nothing(browser: Chromium, written: Path) -> None:
    """Every section has its content after the script has run; the console has no messages, and only the file itself was
    requested."""
    browser.open(written)
    browser.until(looks.DRAWN)
    assert browser.complaints == []
    assert browser.asked == [written.as_uri()]
    assert texts(browser, "h1") == [f"{NAME}finished"]
    assert browser.value("typeof owned") == "undefined"
    assert texts(browser, "h2") == [
        "Where the time went", "Training", "Ranks", "Communication", "Incidents", "Attempts", "Spec",
    ]  # fmt: skip
    assert texts(browser, "figcaption") == [
        "Loss nats per token", "Throughput tokens/s, all ranks", "Throughput in samples samples/s, all ranks",
        "Gradient norm before clipping", "Learning rate",
        "Gradient noise scale sequences",
        "Memory rank by time: resident memory of the rank's process",
        "Slowness rank by step: compute time relative to the median rank",
        "Compute rank by time: share in forward, backward and update, without exposed communication",
        "Exposed communication rank by time: share in collectives, not overlapped with compute",
        "Data rank by time: share in waiting for a batch",
    ]  # fmt: skip
    cards = dict(zip(texts(browser, ".cards dt"), texts(browser, ".cards dd"), strict=True))
    assert {name: value.split("\n")[0] for name, value in cards.items()} == {
        "steps": "200", "loss": "1.0050", "eval loss": "2.5000", "tokens/s": "100", "MFU": "10.0%", "goodput": "79.1%",
        "ranks": "2", "time": "4:13", "versions": "0.1.0",
    }  # fmt: skip
    assert cards["versions"].split("\n")[1] == "python 3.11.9, torch 2.13.0"
    assert "of 200" in cards["steps"]


def test_shares_incidents_and_tables(browser: Chromium, written: Path) -> None:
    """They equal the figures, with readable names."""
    browser.open(written)
    shares = [row.split("\t")[:3] for row in texts(browser, ".parts tr")]
    assert shares == [
        ["compute", "55.3%", "2:20"], ["exposed communication", "15.8%", "0:40"], ["data wait", "7.9%", "0:20"],
        ["evaluation", "1.6%", "4 s"], ["checkpoint", "0.4%", "1 s"], ["recovery", "14.4%", "0:36"], ["start-up", "3.6%", "9 s"],
        ["other", "1.0%", "2.5 s"], ["unknown", "0.0%", "0 s"],
    ]  # fmt: skip
    widths = browser.value(
        "[...document.querySelectorAll('.bar span')].map((one) => one.getBoundingClientRect().width)"
    )
    assert [width / sum(widths) for width in widths] == pytest.approx(
        [seconds / 253 for seconds in story.PARTS.values() if seconds], abs=1e-3
    )
    assert len(texts(browser, ".timeline span")) == 5
    incidents = [row.split("\t") for row in texts(browser, "#incidents tbody tr")]
    assert [row[:5] for row in incidents] == [
        ["1:10", "leak", "1", "-", "1"],
        ["1:34", "injected fault", "1", "81", "1"],
        ["1:36", "worker died", "1", "80", "1"],
        ["1:38", "checkpoint corrupt", "2", "60", "-"],
    ]
    assert incidents[2][5] == "killed by SIGKILL"
    assert "then: restart: failure 1 (of 3); attempt 2 on 2 ranks" in incidents[2][6]
    (row,) = texts(browser, "#communication tbody tr")
    assert row.split("\t") == [
        "all-reduce", "230", "1.0 MiB", "230.0 MiB", "1:55", "2.0 MiB/s", "2.0 MiB/s", "0:46", "19.6%", "rank 0, 1:09",
    ]  # fmt: skip
    assert "No rank was found to be slow" in " ".join(texts(browser, "#ranks .note"))
    assert [row.split("\t")[:7] for row in texts(browser, "#attempts tbody tr")] == [
        ["1", "2", "1", "80", "0:10", "first step 1.0 s", "0"],
        ["2", "2", "51", "200", "7.5 s", "detect 1.0 s, first step 1.0 s", "30"],
    ]
    browser.value("document.querySelector('#spec details').open = true")
    assert NAME in texts(browser, "#spec pre")[0]


def test_values_under_the_pointer(browser: Chromium, written: Path) -> None:
    """A curve shows the step and the value, a heat map the cell's rank and value; the text disappears outside the plot. Arrow keys
    do the same, and a screen reader is told."""
    browser.open(written)
    browser.until(looks.DRAWN)
    browser.point(*place(browser, "Loss", 150, 120))
    assert texts(browser, ".tip div") == ["step 150", "training 90"], "the spike of one step"
    browser.point(*place(browser, "Loss", 81, 120))
    assert texts(browser, ".tip div") == ["step 81", "training 1.012346", "injected fault", "worker died"], (
        "incidents, too"
    )
    assert [words for _, words, _ in browser.value(f"{LOSS}.chart.marks")] == [
        "attempt 2", "leak", "checkpoint corrupt", "injected fault", "worker died",
    ]  # fmt: skip
    browser.point(*place(browser, "Memory", 220, 55))
    told = f"[...{CHART.format(json.dumps('Memory'))}.plot.querySelectorAll('.tip div')].map((one) => one.innerText)"
    browser.until(f"{told}.length === 2")
    assert browser.value(told) == ["rank 1, 3:40 to 3:41", "1.2 GiB"]
    browser.point(1.0, 1.0)
    seen = "checkVisibility({visibilityProperty: true, opacityProperty: true})"
    browser.until(f"[...document.querySelectorAll('.tip div')].every((one) => !one.{seen})")
    browser.value(f"{LOSS}.plot.focus()")
    for _ in range(2):
        browser.page("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
    assert texts(browser, ".spoken")[0].startswith("step 103, training 1.0")
    memory = CHART.format(json.dumps("Memory"))
    assert [(at, words) for at, words, _ in browser.value(f"{memory}.chart.marks")] == [
        (97, "attempt 2"), (70, "leak"), (94.5, "injected fault"), (98, "checkpoint corrupt"), (96, "worker died"),
    ]  # fmt: skip
    browser.value(f"{memory}.plot.focus()")
    for key, rank in (("ArrowRight", 0), ("ArrowDown", 1), ("ArrowLeft", 1)):
        browser.page("Input.dispatchKeyEvent", type="keyDown", key=key)
        assert browser.value(f"{memory}.status.textContent") == f"rank {rank}, 0 to 1.58 s, no value"
    for key in ["ArrowRight"] * 10:
        browser.page("Input.dispatchKeyEvent", type="keyDown", key=key)
    assert browser.value(f"{memory}.status.textContent") == "rank 1, 15.8 s to 17.4 s, 1.0 GiB"


def test_a_heat_map_is_one_picture(browser: Chromium, written: Path) -> None:
    """Of its cells in the view and in the chosen part of the scale; zoomed, a cell is still the one under the pointer."""
    browser.open(written)
    browser.until(looks.DRAWN)
    memory = CHART.format(json.dumps("Memory"))
    filled = f"""(() => {{
        const [picture, ...others] = {memory}.drawing.getZr().storage.getDisplayList(true).filter((one) => one.type === "image");
        const {{width, height}} = picture.style.image, brush = picture.style.image.getContext("2d");
        const opaque = brush.getImageData(0, 0, width, height).data.filter((v, i) => i % 4 === 3 && v);
        return [others.length, opaque.length / width / height];
    }})()"""
    assert browser.value(filled) == [0, pytest.approx(146 / 160, abs=0.02)]
    browser.value(
        f"{memory}.drawing.dispatchAction({{type: 'selectDataRange', visualMapIndex: 0, selected: [1100, 1200]}})"
    )
    chosen = (5 + 101) / 253 / 2  # rank 1 in steps 76 to 80 of the first attempt, and 76 to 176 of the second
    assert browser.value(filled) == [0, pytest.approx(chosen, abs=0.02)]
    browser.value(f"{memory}.plot.focus()")
    browser.page("Input.dispatchKeyEvent", type="keyDown", key="+")
    browser.point(*place(browser, "Memory", 150, 55))
    assert texts(browser, ".tip div") == ["rank 1, 2:29 to 2:30", "1.1 GiB"]
    assert browser.complaints == []
    # The label of an incident near the end is on the left of its line, and not cut off.
    near = """(one) => looks.options({...one, chart: {...one.chart, marks: [[0.95 * one.chart.x.ends[1], "user error", true]]}})"""
    found = """[...raydist.charts.values()].find((one) => one.chart.kind === "heat")"""
    label = browser.value(f"({near})({found}).series[1].markLine.data[0].label")
    assert (label["show"], label["align"]) == (True, "right")


def test_charts_are_drawn_as_they_come_near(browser: Chromium, written: Path) -> None:
    """First those in the view; zoom reaches the others, and the keyboard draws what it reaches. Before printing all are drawn."""
    browser.open(written)
    browser.until(looks.READY)
    waiting = "[...raydist.charts.values()].filter((one) => !one.drawing).map((one) => one.figure.dataset.name)"
    names = browser.value(waiting)
    assert names[-1] == "Data"
    assert browser.value("[...raydist.charts.values()].filter(raydist.seen).some((one) => one.drawing)")
    chart = CHART.format(json.dumps("Data"))
    browser.value(f"{chart}.plot.focus()")
    browser.until(f"{chart}.drawing !== null")
    browser.page("Page.printToPDF")
    browser.until(f"{waiting}.length === 0")
    browser.open(written)
    browser.until(looks.READY)
    browser.value(f"{LOSS}.plot.focus()")
    assert browser.value(waiting)
    browser.page("Input.dispatchKeyEvent", type="keyDown", key="+")
    browser.until(looks.DRAWN)
    shown = "[...raydist.charts.values()].filter((one) => one.zoom).map(({drawing}) => drawing.getOption().dataZoom[0].start > 20)"
    assert browser.value(shown) == [True] * 6
    assert browser.complaints == []


def test_curves_are_zoomed_together(browser: Chromium, written: Path) -> None:
    """By dragging, by keys and back: all curves over steps, and no other chart; a hidden line and a logarithmic axis stay."""
    browser.open(written)
    browser.until(looks.DRAWN)
    drag(browser, place(browser, "Throughput", 50, 120), place(browser, "Throughput", 100, 120))
    found = zooms(browser)
    curves = ["Loss", "Throughput", "Throughput in samples", "Gradient norm", "Learning rate", "Gradient noise scale"]
    assert [name for name, range in found.items() if range] == curves
    assert all(found[name] == found["Loss"] for name in curves)
    assert found["Loss"] == [pytest.approx(50, abs=1), pytest.approx(100, abs=1)]
    assert texts(browser, ".tools button:not([hidden])").count("all") == 6
    extent = "{}.drawing.getModel().getComponent('xAxis').axis.scale.getExtent()"
    assert browser.value(extent.format(LOSS)) == found["Loss"]
    browser.value(f"{LOSS}.plot.focus()")
    for key in ("+", "1"):
        browser.page("Input.dispatchKeyEvent", type="keyDown", key=key)
    low, high = zooms(browser)["Learning rate"]
    assert (low, high) == (pytest.approx(62.5, abs=1), pytest.approx(87.5, abs=1))
    assert browser.value(f"{LOSS}.selected") == {"training": False, "eval": True}
    browser.value("document.querySelector('[aria-label=\"log axis of Loss\"]').click()")
    shown = f"(({{drawing}}) => [drawing.getOption().yAxis[0].type, drawing.getOption().legend[0].selected.training])({LOSS})"
    assert browser.value(shown) == ["log", False]
    assert zooms(browser)["Loss"] == [low, high]
    browser.page("Input.dispatchKeyEvent", type="keyDown", key="Escape")
    assert set(map(str, zooms(browser).values())) == {"None"}
    assert browser.complaints == []


def test_names_under_the_pointer_are_text(browser: Chromium, tmp_path: Path) -> None:
    """Names of a series and of the x axis are no HTML."""
    series = [charts.Series(NAME, np.arange(3.0), np.arange(3.0))]
    chart = charts.lines(NAME, series, charts.Across(NAME), marks=[charts.Mark(1.0, NAME)])
    (tmp_path / "a.html").write_bytes(page.page(NAME, chart))
    browser.open(tmp_path / "a.html")
    browser.until(looks.DRAWN)
    browser.point(*place(browser, NAME, 1, 100))
    assert texts(browser, ".tip div") == [f"{NAME} 1", f"{NAME} 1", NAME]
    assert browser.value("document.querySelectorAll('img').length") == 0
    assert browser.value("document.title") == NAME


def test_every_chart_says_what_it_is(browser: Chromium, written: Path) -> None:
    """For screen readers, and without JavaScript: each chart has a name, and its figures in words; the bar one sentence."""
    browser.page("Emulation.setScriptExecutionDisabled", value=True)
    browser.open(written)
    browser.page("Emulation.setScriptExecutionDisabled", value=False)
    asked = (
        "[...document.querySelectorAll('.plot')].map((one) => [one.getAttribute('role'), one.ariaLabel, one.innerText])"
    )
    drawn = browser.value(asked)
    assert len(drawn) == 11
    assert all(role == "img" and name.endswith(words) and words for role, name, words in drawn)
    assert "training: 199 values, from" in drawn[0][1]
    assert "highest 90" in drawn[0][1]
    assert "need JavaScript" in texts(browser, "noscript")[0]
    assert "compute 55.3%" in browser.value("document.querySelector('.bar').getAttribute('aria-label')")


@pytest.mark.parametrize(
    ("width", "dark", "media"),
    [
        (1400, False, "screen"),
        (1400, True, "screen"),
        (800, True, "screen"),
        (400, False, "screen"),
        (400, True, "screen"),
        (900, True, "print"),
    ],
)
def test_light_dark_phone_paper(browser: Chromium, written: Path, width: int, dark: bool, media: str) -> None:
    """The text has enough contrast, nothing is wider than the page, and print is light also in dark mode."""
    browser.open(written, width=width, dark=dark, media=media)
    paper = media == "print"
    contrast = """(() => {
        const light = (colour) => {
            const part = colour.match(/[\\d.]+/g).slice(0, 3).map((one) => one / 255)
                .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
            return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
        };
        const sheet = light(getComputedStyle(document.querySelector("section")).backgroundColor);
        const ratio = (one) => {
            const ink = light(getComputedStyle(one).color);
            return (Math.max(ink, sheet) + 0.05) / (Math.min(ink, sheet) + 0.05);
        };
        return [sheet, Math.min(...[...document.querySelectorAll("section p, section td, section th, section b.bad")].map(ratio))];
    })()"""
    sheet, least = browser.value(contrast)
    assert sheet < 0.05 if dark and not paper else sheet > 0.9
    assert least >= 4.5, "WCAG AA"
    assert browser.value("document.documentElement.scrollWidth") <= width
    looks.check(browser, lines=8)
    if width == 1400:
        accessibility.check(browser)
    assert browser.complaints == []


def test_a_run_that_was_not_watched(browser: Chromium, tmp_path: Path) -> None:
    """The report of a run without monitoring says in each place what is missing, and how to get it."""
    attempts = [(1, 0, story.steps(1, 80, 1))]
    run = story.write(RunDir(tmp_path / "a"), story.events()[:6], attempts, spec=b"observe: {interval_s: null}\n")
    (tmp_path / "a.html").write_bytes(render(report(run)))
    browser.open(tmp_path / "a.html")
    said = texts(browser, ".missing")
    assert len(said) == 4
    assert all("observe.interval_s: 1.0" in line for line in said)
    assert len(texts(browser, "figure.chart")) == 5
    assert browser.complaints == []


@pytest.mark.parametrize("status", ["running", "lost"])
def test_a_run_without_anything(browser: Chromium, tmp_path: Path, status: str) -> None:
    """With only a spec that is not valid YAML, the page says that no attempt has begun."""
    run = story.write(RunDir(tmp_path / "a"), [], [], status=status, spec=b"a: [\xff")
    (tmp_path / "a.html").write_bytes(render(report(run)))
    browser.open(tmp_path / "a.html")
    assert "No attempt of this run has begun" in texts(browser, "#goodput")[0]
    assert browser.complaints == []


def test_keys_do_not_leave_with_the_page(tmp_path: Path) -> None:
    """A storage's URI may contain keys; the page, which users share, does not show them."""
    run = story.story(RunDir(tmp_path / "a"))
    run.storage.write(SPEC, b"checkpoint: {replicas: ['s3://KEY:sec&ret@bucket/x']}\n")
    data = render(report(run))
    assert b"s3://bucket/x" in data
    assert b"KEY:" not in data


def test_the_browser_would_tell(browser: Chromium, tmp_path: Path) -> None:
    """The page forbids foreign scripts and requests, and the browser's console reports both, so the other tests would notice
    them."""
    path = tmp_path / "x.html"
    made = page.page("x", page.tag("p", "x")).decode()
    path.write_text(made.replace("<p>x</p>", "<script>owned = 1</script><img src=http://127.0.0.1:9/x.png>"))
    browser.open(path)
    assert len(browser.complaints) == 2
    assert browser.value("typeof owned") == "undefined"


NUMBERS = {
    "at",
    "step",
    "rank",
    "attempt",
    "seconds",
    "count",
    "bytes",
    "busbw",
    "least",
    "most",
    "factor",
    "first_step",
}


def told(run: RunDir) -> dict[str, Any]:
    """The figures after a round trip through strict JSON."""
    return dict(json.loads(json.dumps(report(run).facts, allow_nan=False)))


def test_figures_are_plain(tmp_path: Path) -> None:
    """No number has become a string; unknown values are null."""
    found = told(story.story(RunDir(tmp_path / "a")))

    def numbers(value: Any, name: str = "") -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                numbers(item, key)
        elif isinstance(value, list):
            for item in value:
                numbers(item, name)
        elif name in NUMBERS:
            assert value is None or isinstance(value, (int, float)), (name, value)

    numbers(found)
    assert found["memory"]["ranks"][1] == {
        "rank": 1,
        "host": "h1",
        "least": GIB + (1 << 20),
        "median": GIB + (171 << 19),
        "most": GIB + (200 << 20),
    }
    assert found["communication"][0]["most_exposed"] == {"rank": 0, "seconds": pytest.approx(69.0)}
    assert found["versions"] == {"report": "0.1.0", "python": "3.11.9", "torch": "2.13.0"}
