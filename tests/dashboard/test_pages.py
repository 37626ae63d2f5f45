"""The dashboard's pages in a real browser: complete, accessible, up to date without a reload, and without foreign requests."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from raydist.run.directory import RunDir
from raydist.run.log_writer import RunLog
from tests.dashboard import accessibility
from tests.dashboard.conftest import EVIL, Dashboard, running
from tests.report import story
from tests.report.html import looks
from tests.report.html.chromium import WAIT_S, Chromium

RUN = [
    "Findings", "Training", "Where the time went", "Ranks", "Communication", "Incidents", "Attempts", "Checkpoints", "Output",
    "Spec", "Data",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser(dashboard: Dashboard, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """A browser that has opened the printed address, and so has the cookie."""
    with Chromium(tmp_path_factory.mktemp("chromium"), online=True) as made:
        made.open(dashboard.url)
        until(made, "document.title === 'Runs and sweeps - raydist' && location.search === ''")
        yield made


def until(browser: Chromium, true: str) -> None:
    """Waits for it to be true in the page."""
    deadline = time.monotonic() + WAIT_S
    while not browser.value(true):
        assert time.monotonic() < deadline, (true, browser.complaints)
        time.sleep(0.1)  # the page asks the server


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
    assert browser.value("document.documentElement.dataset.ready") == "yes"
    assert texts(browser, "h2") == (heads or [str(dashboard.home)])
    assert browser.complaints == []
    assert {
        address.partition("/")[0] + "//" + address.split("/")[2] for address in browser.asked if address[:5] != "data:"
    } == {dashboard.address}
    assert browser.value("typeof owned") == "undefined"
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")
    if path.startswith("/run/0/base?smooth"):
        looks.check(browser, lines=5)
    accessibility.check(browser)


def test_a_running_run_is_followed(dashboard: Dashboard, browser: Chromium) -> None:
    """New steps appear without a reload; what has not changed is not touched, and what the reader has opened stays open."""
    run = RunDir(dashboard.home / "live")
    story.write(
        run, story.events()[:-1], [(1, 0, story.steps(1, 80, 1)), (2, 50, story.steps(51, 90, 2))], story.readings()
    )
    running(run, 90)
    browser.open(f"{dashboard.address}/run/0/live")
    assert "Now" in texts(browser, "h2")
    assert texts(browser, ".cards dd")[0].split("\n")[0] == "90"
    browser.value("""(() => {
        document.getElementById("spec").mark = 1;
        document.getElementById("head").mark = 1;
        document.querySelector("#ranks details").open = true;
        document.querySelector("#ranks details summary").focus();
    })()""")
    log = RunLog(run)
    log.attempt(2, 90)
    log.steps(story.steps(91, 120, 2))
    log.close()
    running(run, 120)
    until(browser, "document.querySelector('.cards dd').innerText.startsWith('120')")
    assert browser.value("document.getElementById('head').mark") is None
    assert browser.value("document.getElementById('spec').mark") == 1
    assert browser.value("document.querySelector('#ranks details').open")
    assert texts(browser, "#live") == ["live"]
    assert browser.complaints == []
    browser.value("document.querySelector('#training svg').scrollIntoView({block: 'center'})")
    box = browser.value("(() => { const a = document.querySelector('#training svg').getBoundingClientRect(); "
                        "return [a.left + a.width / 2, a.top + a.height / 2]; })()")  # fmt: skip
    browser.point(*box)
    assert texts(browser, "#tip div")[0].startswith("step "), "a chart that was replaced shows its values, too"


def test_the_list_is_searched_and_links_to_its_pages(dashboard: Dashboard, browser: Chromium) -> None:
    """Rows that contain every word stay; the words stand in the address. Names lead to pages, also strange ones."""
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
