"""One page in one file: it loads nothing from the network, and its Content-Security-Policy forbids that.

Runs anywhere. Pure.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

from raydist.report.html.style import CSS, SCRIPT
from raydist.report.html.svg import Child, Markup, join, tag

_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
_RULES = (
    f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{_HASH}'; "
    "base-uri 'none'; form-action 'none'"
)
"""Content-Security-Policy: nothing is loaded, and only this script runs."""


def page(title: str, *body: Child) -> bytes:
    """A whole document."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_RULES),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Markup(CSS)),
    )
    tip = tag("div", id="tip", hidden=True, role="status")
    content = tag("body", tag("main", body), tip, tag("script", Markup(SCRIPT)))
    return f"<!doctype html>\n{tag('html', head, content, lang='en')}\n".encode()


def section(title: str, *body: Child, id: str | None = None) -> Markup:
    """A part of the page with a heading."""
    return tag("section", tag("h2", title), body, id=id)


def cards(figures: Sequence[tuple[str, str, str]]) -> Markup:
    """Cards side by side, each a (name, value, remark)."""
    return tag(
        "dl",
        [
            tag("div", tag("dt", name), tag("dd", value, tag("small", more) if more else None))
            for name, value, more in figures
        ],
        class_="cards",
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[Child]]) -> Markup:
    """`>` after a heading: numbers, aligned right; `~`: text that wraps. The first column names the row."""
    tall = "tall" if any(name.endswith("~") for name in columns) else None  # on a phone each row becomes a paragraph
    looks = ["number" if name.endswith(">") else "words" if name.endswith("~") else None for name in columns]
    head = [tag("th", name.rstrip(">~"), class_=look, scope="col") for name, look in zip(columns, looks, strict=True)]
    names = [name.rstrip(">~") for name in columns]
    body = [tag("tr", [_cell(i, *each) for i, each in enumerate(zip(row, looks, names, strict=True))]) for row in rows]
    whole = tag("table", tag("thead", tag("tr", head)), tag("tbody", body), class_=tall)
    return tag("div", whole, class_="wide", tabindex="0")


def _cell(column: int, cell: Child, look: str | None, name: str) -> Markup:
    if column == 0:
        return tag("th", cell, class_=look, scope="row", data_label=name)
    return tag("td", cell, class_=look, data_label=name)


def folded(title: str, text: str) -> Markup:
    """Preformatted text that is shown on a click."""
    return tag("details", tag("summary", title), tag("pre", text, tabindex="0"))


def missing(text: str) -> Markup:
    """In place of missing content: why it is missing, and how to get it."""
    return tag("p", text, class_="missing")


def lines(parts: Sequence[Child]) -> Markup:
    """Parts, one below the other."""
    return join([tag("div", part) for part in parts if part])
