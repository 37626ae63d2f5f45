"""The page of `raydist sweep report` in a real browser: it shows all data of the sweep, and sends no request."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raydist.cli import main as cli
from raydist.report.html.sweep import render
from raydist.report.sweep.conclusions import named
from raydist.report.sweep.curves import curves
from raydist.report.sweep.results import tell
from tests.dashboard import accessibility
from tests.report.html import looks
from tests.report.html.chromium import Chromium
from tests.report.sweep.conftest import Swept, swept, train

__all__ = ["swept"]
GRID = "array: {parameters: {lr: [1e-4, 3e-4, 1e-3, 3e-3], batch_size: [16, 32]}, seeds: 2}\nlimits: {cost_per_gpu_hour: 2}"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """One browser for all tests here."""
    with Chromium(tmp_path_factory.mktemp("chromium")) as made:
        yield made


def texts(browser: Chromium, selector: str) -> list[str]:
    """The text of each element."""
    return list(browser.value(f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)"))


def test_the_page_of_a_grid(swept: Callable[..., Swept], browser: Chromium, tmp_path: Path, capsys: Any) -> None:
    """The page of the command has conclusions, heat map, optimum, curves and every point; the console has no messages."""
    made = swept(GRID, "a-sweep")
    for i, cell in enumerate(made.cells):
        lr, batch = cell.job.optim.lr, cell.job.train.global_batch
        made.finish(
            i,
            2 + 0.1 * math.log(lr / (4e-4 * (batch / 16) ** 0.5)) ** 2 + 0.01 * (cell.seed - 17),
            grad_noise_scale=24.0,
            course={"eval_loss": [[s, s * batch / 100, s * batch / 50, 4.0 - lr * s - i / 50] for s in (25, 50, 75)]},
        )
    train(made.folder.run(made.cells[2].id), made.cells[2], [5.0, 4.0, 3.0], 2.5)
    with pytest.raises(SystemExit) as caught:
        cli.main(["sweep", "report", made.folder.uri])
    assert not caught.value.code
    path = Path(capsys.readouterr().out.strip())
    assert path == Path(made.folder.uri) / "report.html"
    told = tell(made.folder)
    browser.open(path)
    assert texts(browser, "#words li") == told["analysis"]["words"]
    assert [line.split(" (")[0] for line in texts(browser, "#words li")][-1].startswith(
        "optimum of learning_rate at batch_size 32: 0.0005"
    )
    assert texts(browser, "#charts figcaption")[:3] == [
        "eval_loss by learning_rate and batch_size",
        "eval_loss over learning_rate",
        "Loss over tokens the best cells",
    ]
    grid, rates = (data(browser, f"#charts figure:nth-child({place})") for place in (1, 2))
    assert (grid["y"], grid["x"]["name"], grid["columns"]) == ("learning_rate", "batch_size", ["16", "32"])
    assert grid["rows"] == ["0.003", "0.001", "0.0003", "0.0001"]
    assert [words for _, words, _ in grid["marks"]] == ["noise scale 24"]
    assert grid["values"][2] == [pytest.approx(told["points"][i]["objective"], rel=1e-4) for i in (2, 3)]
    assert (rates["x"]["kind"], rates["x"]["ticks"]) == ("log", [1e-4, 3e-4, 1e-3, 3e-3])
    assert_fronts(browser, told)
    lines = data(browser, "#parameters figure")
    assert len(lines["names"]) == len(lines["rows"]) == 8
    assert lines["names"][lines["best"]].startswith("learning_rate 0.0003, batch_size 16: eval_loss 2.0")
    # The axis of learning rates ends with them, and times below a second are told apart.
    option = "looks.options([...raydist.charts.values()].find((one) => {}))".format
    ends = browser.value(
        f"""(({{min, max}}) => [min, max])({option('one.chart.kind === "parallel"')}.parallelAxis[0])"""
    )
    assert ends == [1e-4, 3e-3]
    written = f"""[{option('one.chart.x?.form === "clock"')}.xAxis].flat()[0].axisLabel.formatter"""
    assert browser.value(f"[0, 60, 900, 90_000].map({written})") == ["0", "60 ms", "0.9 s", "1:30"]
    assert len(texts(browser, "#points tbody tr")) == 8
    assert texts(browser, "#points tbody th")[0] == told["points"][told["best"]]["cells"][0]
    assert texts(browser, "#lineage") == []
    assert browser.complaints == []
    assert {address.partition(":")[0] for address in browser.asked} <= {"file", "data"}


def data(browser: Chromium, figure: str) -> dict[str, Any]:
    """What a figure is drawn from."""
    return dict(json.loads(browser.value(f"document.querySelector('{figure} script').textContent")))


WORDS = (
    "array: {parameters: {learning_rate: [1e-4, 1e-3, 1e-2], optim.schedule: [wsd, {name: cosine, warmup: 0.05}],"
    " observe.grad_noise: [1, 100]}}"
)


@pytest.mark.parametrize(
    ("text", "width", "dark"),
    [
        (text, width, (i + n) % 2 == 1)
        for n, text in enumerate((GRID, WORDS))
        for i, width in enumerate((400, 800, 1400))
    ],
)
def test_lines_are_seen_and_labels_are_whole(
    swept: Callable[..., Swept], browser: Chromium, tmp_path: Path, text: str, width: int, dark: bool
) -> None:
    """In light and dark mode, on a phone and on a large screen, two of these at a time; also the best line, and long names and
    values."""
    made = swept(text)
    for i, cell in enumerate(made.cells):
        course = {"eval_loss": [[s, s * (1 + i / 30), s * (2 + i / 15), 3.0 - s / 100 + i / 50] for s in (25, 50, 75)]}
        made.finish(i, 2 + abs(i - 3) / 30, grad_noise_scale=24.0, course=course)
        train(made.folder.run(cell.id), cell, [5.0, 4.0, 3.0], 2.5)
    told = tell(made.folder)
    (tmp_path / "s.html").write_bytes(render(told, curves(told, 6)))
    browser.open(tmp_path / "s.html", width=width, dark=dark)
    drawn = looks.check(browser, lines=12)
    rows = [width for _, name, width in drawn if name.endswith(" by all parameters")]
    assert rows == [1.4] * (len(told["points"]) - 1) + [4]
    if width == 1400:
        accessibility.check(browser)
    assert browser.value("document.documentElement.scrollWidth") <= width


def assert_fronts(browser: Chromium, told: dict[str, Any]) -> None:
    """Each front is a table, and a chart that numbers its cells. tests/report/sweep/test_time_to_loss.py checks fronts by brute
    force."""
    captions = texts(browser, "#reach figcaption")
    assert [caption.strip() for caption in captions] == ["eval_loss over seconds trained", "eval_loss over cost"]
    for place, axis in enumerate(("seconds", "amount")):
        front = told["pareto"][axis]
        part = f"#reach .charts > div:nth-child({place + 1})"
        rows = browser.value(
            f"[...document.querySelectorAll('{part} tbody tr')].map((row) => [...row.children].map((one) => one.textContent))"
        )
        order = list(dict.fromkeys(one["point"] for one in front))
        assert [row[0] for row in rows] == [str(order.index(one["point"]) + 1) for one in front]
        assert [[row[1], row[4]] for row in rows] == [[str(one["step"]), f"{one['objective']:.4f}"] for one in front]
        assert [row[5] for row in rows] == ["{:.4f} to {:.4f}".format(*one["objective_range"]) for one in front]
        series = data(browser, f"{part} figure")["series"]
        assert 1 < len(order) == len(series)
        names = [f"{i} {named(told['points'][point]['parameters'])}" for i, point in enumerate(order, start=1)]
        assert [one["name"] for one in series] == names
        assert [one["labels"][0] for one in series] == [str(i) for i in range(1, len(order) + 1)]


def test_a_page_before_anything_has_finished(swept: Callable[..., Swept]) -> None:
    """The page says so, and a user's text in a value cannot become HTML."""
    made = swept("array: {type: list, parameters: [{data.source: '<img src=x onerror=owned=1>'}, {data.source: y}]}")
    written = render(tell(made.folder), []).decode()
    assert "No cell has finished yet." in written
    assert "<img" not in written.partition("</main>")[0]
    assert "&lt;img src=x" in written


def test_parallel_axes_take_words(swept: Callable[..., Swept]) -> None:
    """A value that is not a number is shown as text on its axis; a parameter with one value has no axis."""
    made = swept("array: {parameters: {lr: [1e-4, 1e-3, 1e-2], schedule: [wsd, cosine], clip: 1}}")
    for i in range(6):
        made.finish(i, 2.0 + i)
    written = render(tell(made.folder), []).decode()
    (text,) = re.findall(r'class="chart parallel".*?<script type="application/json">(.*?)</script>', written)
    drawn = json.loads(text)
    assert [(one["name"], one["words"]) for one in drawn["axes"]] == [
        ("learning_rate", []), ("schedule", ["cosine", "wsd"]), ("eval_loss", []),
    ]  # fmt: skip
    assert (len(drawn["names"]), {row[1] for row in drawn["rows"]}) == (6, {0, 1})


def test_lineage_stands_on_the_page(swept: Callable[..., Swept]) -> None:
    """With pbt, the page shows which cell continued from which other one's checkpoint, and the changed values."""
    made = swept("pbt.yaml")
    made.finish(0, 2.0)
    made.end(1, "exploited", source=made.cells[0].id, step=20, tokens=81920, changes={"optim.lr": [0.001, 0.0008]})
    written = render(tell(made.folder), []).decode()
    assert "learning_rate 0.001 -&gt; 0.0008" in written
    assert "81,920" in written


def test_curves_are_over_tokens(swept: Callable[..., Swept]) -> None:
    """Held-out losses if there are any, else training losses; a cell without its run has no curve."""
    made = swept("array: {parameters: {lr: [1, 2, 3]}}")
    for i in range(3):
        made.finish(i, 2.0 + i)
    train(made.folder.run(made.cells[0].id), made.cells[0], [5.0, 4.0, 3.0], 2.5)
    train(made.folder.run(made.cells[1].id), made.cells[1], [5.0, 4.0], None)
    first, second = curves(tell(made.folder), 3)
    assert (first.name, first.tokens.tolist(), first.losses.tolist()) == ("learning_rate 1", [300.0], [2.5])
    assert (second.tokens.tolist(), second.losses.tolist()) == ([100.0, 200.0], [5.0, 4.0])
