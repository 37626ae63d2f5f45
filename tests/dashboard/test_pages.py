"""The dashboard's pages in a real browser: complete, accessible, up to date without a reload, and without foreign requests."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image  # of tensorboard

from raydist.dashboard.document import LIBRARY
from raydist.run import requests
from raydist.run.directory import RunDir
from raydist.run.log_writer import RunLog
from raydist.run.telemetry_log import TelemetryLog
from tests.dashboard import accessibility
from tests.dashboard.conftest import EVIL, Dashboard, acting, running
from tests.report import story
from tests.report.html import looks
from tests.report.html.chromium import Chromium
from tests.report.html.looks import LOSS, drag, place, zooms

RUN = [
    "Findings", "Training", "Where the time went", "Ranks", "Communication", "Incidents", "Attempts", "Checkpoints", "Output",
    "Difference of the jobs", "Spec", "Data",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser(dashboard: Dashboard, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """A browser that has opened the printed address, and so has the cookie."""
    with Chromium(tmp_path_factory.mktemp("chromium"), online=True) as made:
        made.open(dashboard.url)
        made.until("document.title === 'Runs and sweeps - raydist' && location.search === ''")
        yield made


def texts(browser: Chromium, selector: str) -> list[str]:
    """The visible text of each element."""
    return list(browser.value(f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.innerText)"))


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (400, True)], ids=["wide and light", "phone and dark"])
@pytest.mark.parametrize(
    ("path", "heads"),
    [
        ("/", []),
        ("/run/0/base?smooth=20&y=log&with=" + quote(EVIL), RUN),
        ("/sweep/0/tuned", ["Conclusions", "Charts", "Parameters", "Points"]),
        ("/run/0/base?with=none", ["Problem"]),
    ],
    ids=["list", "run", "sweep", "problem"],
)  # fmt: skip
def test_a_page_is_whole_and_accessible(
    dashboard: Dashboard, browser: Chromium, path: str, heads: list[str], width: int, dark: bool
) -> None:
    """All sections; no message on the console, no request to another place, nothing wider than a phone, no violation of axe's
    rules; drawings are readable."""
    browser.open(dashboard.address + path, width=width, dark=dark)
    browser.until(looks.DRAWN)
    assert texts(browser, "h2")[-len(heads or [""]) :] == (heads or [str(dashboard.home)])
    assert browser.complaints == []
    assert {
        address.partition("/")[0] + "//" + address.split("/")[2] for address in browser.asked if address[:5] != "data:"
    } == {dashboard.address}
    assert browser.value("typeof owned") == "undefined"
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")
    if path.startswith("/run/0/base?smooth"):
        looks.check(browser, lines=6)
    accessibility.check(browser)


def hardware(run: RunDir) -> None:
    """Two readings of a rank, its node and its GPU, which do not become old while the test waits."""
    samples = TelemetryLog(run)
    later, where = time.time() + 86_400, {"host": "h0", "node": "10.0.0.1"}
    for number in (0, 1):
        seconds = {
            "forward_seconds": 4.0,
            "backward_seconds": 5.0,
            "all_reduce_exposed_seconds": 5.0,
            "data_seconds": 1.0,
        }
        rank = {"kind": "rank", "rank": 0, "gpu": 0, "attempt": 2, "step": 89 + number, "rss_bytes": 1 << 30}
        node = {
            "kind": "node",
            "cpu_util": 0.5,
            "memory_used_bytes": 4 << 30,
            "memory_total_bytes": 8 << 30,
            "nic": "eth0",
        }
        gpu = {"kind": "gpu", "gpu": 0, "gpu_name": "H100", "gpu_util": 0.75, "gpu_memory_used_bytes": 2 << 30,
               "gpu_memory_total_bytes": 8 << 30, "gpu_power_watts": 350.0, "gpu_temperature_celsius": 61.0,
               "gpu_throttle": "power"}  # fmt: skip
        rows = [
            {**rank, **{name: value * number for name, value in seconds.items()}},
            {**node, "nic_in_bytes": 5000 * number, "nic_out_bytes": 10_000 * number},
            gpu,
        ]
        samples.add([{**row, **where, "at": later + 10 * number} for row in rows])
    samples.flush()


def test_a_running_run_is_followed(dashboard: Dashboard, browser: Chromium) -> None:
    """New steps appear without a reload; what has not changed is not touched, and what the reader has opened stays open. The list
    shows it apart."""
    run = RunDir(dashboard.home / "live")
    story.write(
        run, story.events()[:-1], [(1, 0, story.steps(1, 80, 1)), (2, 50, story.steps(51, 90, 2))], story.readings()
    )
    hardware(run)
    running(run, 90)
    browser.open(f"{dashboard.address}/")
    browser.until("document.querySelector('#running-0') !== null")
    assert texts(browser, "#running-0 tbody a") == ["live"]
    browser.open(f"{dashboard.address}/run/0/live")
    assert "Now" in texts(browser, "h2")
    assert texts(browser, ".cards dd")[0].split("\n")[0] == "90"
    assert [row.split("\t") for row in texts(browser, "#now tbody tr")] == [
        ["0", "h0", "90", "2.0 GiB", "25%", "40%", "50%", "10%", "75%", "500 B/s", "1000 B/s"]
    ]
    assert [row.split("\t") for row in texts(browser, "#nodes tbody tr")] == [
        ["h0 10.0.0.1", "50%", "4.0 GiB of 8.0 GiB", "eth0", "500 B/s", "1000 B/s"],
        ["h0 0", "H100", "75%", "2.0 GiB of 8.0 GiB", "350 W", "61 °C", "power"],
    ]
    accessibility.check(browser)
    browser.value("""(() => {
        document.getElementById("spec").mark = 1;
        document.getElementById("head").mark = 1;
        document.querySelector("#ranks details").open = true;
        document.querySelector("#ranks details summary").focus();
    })()""")
    drag(browser, place(browser, "Loss", 20, 120), place(browser, "Loss", 60, 120))
    browser.point(*place(browser, "Loss", 30, 120))
    assert texts(browser, ".tip div")[0] == "step 30"
    shown = zooms(browser)["Loss"]
    log = RunLog(run)
    log.attempt(2, 90)
    log.steps(story.steps(91, 120, 2))
    log.close()
    running(run, 120)
    browser.until("document.querySelector('.cards dd').innerText.startsWith('120')")
    assert browser.value("document.getElementById('head').mark") is None
    assert browser.value("document.getElementById('spec').mark") == 1
    assert browser.value("document.querySelector('#ranks details').open")
    assert texts(browser, "#live") == ["live"]
    assert browser.complaints == []
    assert zooms(browser)["Loss"] == shown, "newer data does not move the view"
    steps = "[...raydist.charts.values()].filter((one) => one.chart.x.name === 'step')"
    assert browser.value(f"{steps}.map((one) => one.chart.x.ends[1])") == [120] * 7, (
        "also of charts that are not drawn yet"
    )
    assert texts(browser, ".tip div")[0] == "step 30"
    assert browser.value("[...raydist.charts.keys()].every((one) => one.isConnected)")


def test_a_button_asks_first_and_says_what_came_of_it(browser: Chromium, tmp_path: Path) -> None:
    """By the page's own script, with the cookie and the Origin that the server wants: declined, nothing is sent; accepted, the
    request is in the run's folder, and the page says so, or why not. It is accessible."""
    with acting(tmp_path) as (served, run, _):
        browser.open(served.url)
        browser.until("document.title === 'Runs and sweeps - raydist' && document.readyState === 'complete'")
        browser.open(f"{served.address}/run/0/live")
        assert texts(browser, "#actions button") == ["Save a checkpoint", "Trace 3 steps", "Stop"]
        accessibility.check(browser)
        asks = browser.press("[data-act=stop]", accept=False)
        assert asks == "End this run after one checkpoint? The command that started it resumes it."
        answered = "document.getElementById('action-answer').innerText"
        assert browser.value(answered) == ""
        browser.press("[data-act=checkpoint]", accept=True)
        browser.until(f"{answered} === 'A checkpoint is asked for.'")
        browser.press("[data-act=checkpoint]", accept=True)
        browser.until(f"{answered} === 'run live is asked for a checkpoint already: wait for it'")
        while not requests.pending(run):
            time.sleep(0.05)
        assert [one.what for one in requests.pending(run)] == ["checkpoint"]
        browser.press("[data-act=stop]", accept=True)
        browser.until(
            f"{answered}.endsWith(' is asked to end the run after one checkpoint.')"
        )  # "was", if it had been before
        browser.until("document.querySelector('[data-act=stop]').disabled === false")
        assert browser.complaints == []


def test_a_run_whose_driver_was_killed_is_lost(dashboard: Dashboard, browser: Chromium) -> None:
    """In the list and on its page, though none of its files has changed."""
    run = RunDir(dashboard.home / "killed")
    with subprocess.Popen(["sleep", "86400"]) as driver:
        story.write(run, story.events()[:-1], [(1, 0, story.steps(1, 80, 1))])
        running(run, 80, driver.pid)
        row = "[...document.querySelectorAll('tr')].find((one) => one.innerText.startsWith('killed'))?.innerText || ''"
        browser.open(f"{dashboard.address}/run/0/killed")
        assert texts(browser, "h1") == ["killedrunning"]
        browser.open(f"{dashboard.address}/")
        browser.until(f"({row}).includes('running')")
        driver.kill()
    browser.until(f"({row}).includes('lost')")
    browser.open(f"{dashboard.address}/run/0/killed")
    browser.until("document.querySelector('h1').innerText === 'killedlost'")


def test_dragging_over_a_chart_chooses_the_steps_of_the_form(dashboard: Dashboard, browser: Chromium) -> None:
    """They stand in its fields; Show puts them in the address, and all curves have only them. A link leads back to all steps."""
    browser.open(f"{dashboard.address}/run/0/base?y=log")
    browser.until(looks.DRAWN)
    drag(browser, place(browser, "Loss", 50, 120), place(browser, "Loss", 100, 120))
    assert zooms(browser)["Throughput"] is not None
    browser.value("document.querySelector('#view button').click()")
    browser.until(f"location.search.includes('last=') && {looks.DRAWN}")
    first, last, scale = browser.value(
        "['first', 'last', 'y'].map((name) => new URL(location.href).searchParams.get(name))"
    )
    assert (abs(int(first) - 50) <= 1, abs(int(last) - 100) <= 1, scale) == (True, True, "log")
    ends = browser.value("[...raydist.charts.values()].map((one) => one.chart.x.ends)")
    assert ends[:4] == [[int(first), int(last)]] * 4
    browser.open(browser.value("document.querySelector('#view a').href"))
    browser.until(looks.DRAWN)
    assert browser.value(f"{LOSS}.chart.x.ends") == [1, 200]
    assert browser.value("new URL(location.href).searchParams.get('y')") == "log"
    drag(browser, place(browser, "Loss", 50, 120), place(browser, "Loss", 100, 120))
    browser.value(f"{LOSS}.reset.click()")
    assert browser.value("document.getElementById('view').elements.first.value") == ""


def downloaded(path: Path) -> Path:
    """The file, once Chromium has saved it."""
    until = time.monotonic() + 240
    while not path.exists():
        assert time.monotonic() < until, f"{path.name} was not saved"
        time.sleep(0.05)
    return path


def test_a_chart_is_saved_as_a_picture_and_as_values(dashboard: Dashboard, browser: Chromium, tmp_path: Path) -> None:
    """A line chart with another run's curve, and a heat map: the downloaded PNG is twice the chart's size, with its title above,
    and has the colours of the page; the CSV has its values. Only the page and its files are requested."""
    browser.open(f"{dashboard.address}/run/0/base?with={quote(EVIL)}")
    browser.until(looks.DRAWN)
    browser.ask("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path), eventsEnabled=False)
    palette = "getComputedStyle(document.documentElement).getPropertyValue('--{}').trim().split(' ').map((one) => one.slice(1))"
    for name, file, wanted in (
        ("Loss", "base-Loss.png", browser.value(palette.format("series"))[:3]),
        ("Memory", "base-Memory.png", browser.value(palette.format("even"))[-1:]),
    ):
        button = f"document.querySelector('button[aria-label=\"save {name} as PNG\"]')"
        wide, high = browser.value(
            f"(({{plot}}) => [plot.clientWidth, plot.clientHeight])(raydist.charts.get({button}.closest('figure')))"
        )
        browser.value(f"{button}.click()")
        with Image.open(downloaded(tmp_path / file)) as picture:
            shown = picture.convert("RGB")
        assert shown.size == (wide * 2, high * 2 + 64)
        assert shown.getpixel((2, 2)) == (255, 255, 255)
        assert len(colours(shown.crop((0, 0, shown.width, 64)))) > 3, "title"
        assert {tuple(bytes.fromhex(one)) for one in wanted} <= colours(shown.crop((0, 64, *shown.size)))
    for name in ("Loss", "Memory"):
        browser.value(f"document.querySelector('button[aria-label=\"save {name} as CSV\"]').click()")
    losses = downloaded(tmp_path / "base-Loss.csv").read_text().splitlines()
    assert (losses[0], losses[1]) == ('"series","step","value"', '"base",1,2')
    assert f'"{EVIL}",150,90' in losses
    memory = downloaded(tmp_path / "base-Memory.csv").read_text().splitlines()
    assert memory[0] == '"rank","since the first attempt\'s start","MiB"'
    (value,) = [float(row.rpartition(",")[2]) for row in memory if row.startswith('"1","3:40 to 3:41",')]
    assert value == pytest.approx(1024 + 169, abs=2)
    assert {one.partition("?")[0] for one in browser.asked if one[:5] not in ("data:", "blob:")} == {
        *(f"{dashboard.address}{path}" for path in ("/run/0/base", "/look.css", "/chart.js", LIBRARY, "/live.js"))
    }
    assert browser.complaints == []


def colours(picture: Image.Image) -> set[tuple[int, ...]]:
    """All colours in it."""
    return {(int(r), int(g), int(b)) for r, g, b in np.unique(np.asarray(picture).reshape(-1, 3), axis=0)}


def test_the_list_is_searched_and_links_to_its_pages(dashboard: Dashboard, browser: Chromium) -> None:
    """Rows that contain every word stay; the words stand in the address. Each status is a link that keeps its rows. Names lead to
    pages, also strange ones."""
    browser.open(dashboard.address)
    browser.value(
        "[...document.querySelectorAll('#head a')].find((one) => one.innerText.startsWith('sweep (1)')).click()"
    )
    browser.until("location.search === '?q=sweep' && document.readyState === 'complete'")
    assert browser.value("[...document.querySelectorAll('tbody tr')].filter((one) => !one.hidden).length") == 1
    browser.open(f"{dashboard.address}/?q=tuned")
    seen = "[...document.querySelectorAll('tbody tr')].filter((one) => !one.hidden).map((one) => one.querySelector('a').innerText)"
    assert browser.value(seen) == ["tuned"]
    assert browser.value("document.getElementById('filter').value") == "tuned"
    browser.value("""(() => {
        const field = document.getElementById("filter");
        field.value = "IMG finished";
        field.dispatchEvent(new Event("input"));
    })()""")
    assert browser.value(seen) == [EVIL]
    assert browser.value("new URL(location.href).searchParams.get('q')") == "IMG finished"
    links = browser.value("[...document.querySelectorAll('tbody a')].map((one) => one.href)")
    assert f"{dashboard.address}/sweep/0/tuned" in links
    browser.open(f"{dashboard.address}/run/0/{quote(EVIL, safe='')}")
    assert texts(browser, "h1") == [f"{EVIL}finished"]
    assert browser.value("typeof owned") == "undefined"


def test_a_sweep_links_to_the_runs_of_its_cells(dashboard: Dashboard, browser: Chromium) -> None:
    """And a cell back to its sweep; a cell without a run says so."""
    browser.open(f"{dashboard.address}/sweep/0/tuned")
    cells = browser.value("[...document.querySelectorAll('#points tbody a')].map((one) => one.href)")
    assert len(cells) == 2
    found = []
    for cell in cells:
        browser.open(cell)
        found.append(texts(browser, "h1")[0])
    assert sorted(found)[0] == "Not here"
    browser.open(cells[found.index(next(one for one in found if one != "Not here"))])
    links = browser.value("[...document.querySelectorAll('nav a')].map((one) => one.href)")
    assert links == [f"{dashboard.address}/", f"{dashboard.address}/sweep/0/tuned"]
