"""The charts of an open page: whether they are visible and readable, by what the library has drawn; pointing and dragging."""

from __future__ import annotations

import json
from typing import Any

from tests.report.html.chromium import Chromium

READY = "document.documentElement?.dataset.ready === 'yes'"
"""Whether the charts near the view are drawn."""
DRAWN = f"{READY} && (raydist.whole(), true)"
"""Draws the others, too."""
CHART = "[...raydist.charts.values()].find((one) => one.figure.dataset.name === {})"
LOSS = CHART.format('"Loss"')
"""A chart by its name, as JSON; and the first one of a run."""
_ASKED = """
(() => {
    const brush = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const light = (colour) => {
        brush.fillStyle = colour;
        brush.fillRect(0, 0, 1, 1);
        const part = [...brush.getImageData(0, 0, 1, 1).data].slice(0, 3).map((one) => one / 255)
            .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
        return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
    };
    const sheet = light(getComputedStyle(document.querySelector("section")).backgroundColor);
    const lines = [], cut = [], small = [];
    let texts = 0;
    for (const {figure, drawing, chart} of raydist.charts.values()) {
        const name = figure.dataset.name, wide = drawing.getWidth(), high = drawing.getHeight();
        for (const one of drawing.getZr().storage.getDisplayList(true)) {
            const {style} = one;
            if ({lines: ["ec-polyline", "ec-line"], parallel: ["polyline"], heat: []}[chart.kind].includes(one.type)) {
                const ink = light(style.stroke);
                if (style.opacity === 1 || style.opacity === undefined)
                    lines.push([(Math.max(ink, sheet) + 0.05) / (Math.min(ink, sheet) + 0.05), name, style.lineWidth]);
            }
            if (one.type !== "tspan" || one.__clipPaths?.length || !style.text) continue;  // names on the legend's other pages
            texts += 1;
            const box = one.getBoundingRect().clone();
            if (one.transform) box.applyTransform(one.transform);
            if (box.x < -0.5 || box.x + box.width > wide + 0.5 || box.y < -2 || box.y + box.height > high + 2)
                cut.push(`${name}: ${style.text}`);
            if (parseFloat(style.font.match(/[\\d.]+px/)) < 9) small.push(`${name}: ${style.text}`);
        }
    }
    return {lines, cut, small, texts};
})()
"""


def check(browser: Chromium, *, lines: int) -> list[Any]:
    """In the open page, every line that shows data has a contrast of 3:1 to its background (WCAG 1.4.11), no label of a chart is
    cut off, and none is smaller than 9 pixels. `lines`: the minimum number of such lines. Returns
    contrast, chart and width of each."""
    browser.until(DRAWN)
    found: dict[str, Any] = browser.value(_ASKED)
    assert len(found["lines"]) >= lines
    assert found["texts"] > 10
    assert [one for one in found["lines"] if one[0] < 3.0] == []
    assert (found["cut"], found["small"]) == ([], [])
    return list(found["lines"])


def place(browser: Chromium, name: str, x: float, y: float) -> list[float]:
    """The screen position of a point of a chart, which is scrolled into view. `x`: in the unit of its axis; `y`: pixels below the
    top."""
    script = f"""(() => {{
        const {{plot, drawing, chart}} = {CHART.format(json.dumps(name))};
        plot.scrollIntoView({{block: "center"}});
        const box = plot.getBoundingClientRect(), axis = {{xAxisIndex: chart.kind === "heat" ? 1 : 0}};
        return [box.left + drawing.convertToPixel(axis, {x} * (chart.x.kind === "time" ? 1000 : 1)), box.top + {y}];
    }})()"""
    return list(browser.value(script))


def drag(browser: Chromium, start: list[float], end: list[float]) -> None:
    """With the left button of the mouse."""
    for kind, (x, y), buttons in (("mousePressed", start, 1), ("mouseMoved", end, 1), ("mouseReleased", end, 0)):
        button = "none" if kind == "mouseMoved" else "left"
        browser.page("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=buttons, clickCount=1)


def zooms(browser: Chromium) -> dict[str, Any]:
    """The steps that each curve shows; None for all."""
    return dict(
        browser.value(
            "Object.fromEntries([...raydist.charts.values()].map((one) => [one.figure.dataset.name, one.zoom]))"
        )
    )
