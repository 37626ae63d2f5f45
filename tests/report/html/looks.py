"""Checks that the drawings of a page are visible and readable, by the browser's own layout."""

from __future__ import annotations

from typing import Any

from tests.report.html.chromium import Chromium

_ASKED = """
(() => {
    const light = (colour) => {
        const part = colour.match(/[\\d.]+/g).slice(0, 3).map((one) => one / 255)
            .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
        return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
    };
    const sheet = light(getComputedStyle(document.querySelector("section")).backgroundColor);
    const lines = [...document.querySelectorAll("svg .line:not(.faint), svg .row, svg path.mark")].map((one) => {
        const ink = light(getComputedStyle(one).stroke);
        return [(Math.max(ink, sheet) + 0.05) / (Math.min(ink, sheet) + 0.05), one.getAttribute("class")];
    });
    const cut = [], small = [];
    for (const one of document.querySelectorAll("svg text")) {
        const at = one.getBoundingClientRect(), wide = one.closest(".wide"), box = wide || one.closest("section");
        const around = box.getBoundingClientRect(), moved = wide ? wide.scrollLeft : 0;
        const right = wide ? wide.scrollWidth : around.width;
        if (at.left - around.left + moved < -0.5 || at.right - around.left + moved > right + 0.5) cut.push(one.textContent);
        const size = parseFloat(getComputedStyle(one).fontSize) * one.getScreenCTM().a;
        if (size < 8.9) small.push(`${one.textContent}: ${size.toFixed(1)} px`);
    }
    return {lines, cut, small, texts: document.querySelectorAll("svg text").length};
})()
"""


def check(browser: Chromium, *, lines: int) -> None:
    """In the open page, every line that shows data has a contrast of 3:1 to its background (WCAG 1.4.11), no label of a drawing
    is cut off, and none is smaller than 9 pixels. `lines`: the minimum number of such lines."""
    found: dict[str, Any] = browser.value(_ASKED)
    assert len(found["lines"]) >= lines
    assert found["texts"] > 10
    assert [one for one in found["lines"] if one[0] < 3.0] == []
    assert (found["cut"], found["small"]) == ([], [])
