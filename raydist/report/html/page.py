"""One page in one file: it loads nothing from the network, and its Content-Security-Policy forbids that.

Runs anywhere. Pure.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
from collections.abc import Sequence
from pathlib import Path

from raydist.redact import redact
from raydist.report.html.elements import Child, Markup, join, tag
from raydist.report.html.style import CSS

HERE = Path(__file__).parent
NO_SCRIPT = tag(
    "noscript", tag("p", "The charts need JavaScript; without it, each is described in words.", class_="missing")
)


@functools.cache
def library() -> str:
    """Apache ECharts, in a build of what charts need."""
    return (HERE / "vendor" / "echarts.min.js").read_text(encoding="utf-8")


@functools.cache
def script() -> str:
    """The script that draws charts."""
    return "".join((HERE / name).read_text(encoding="utf-8") for name in ("looks.js", "chart.js"))


@functools.cache
def _scripts() -> tuple[str, str]:
    """A small script that unpacks another one and runs it, and that other one: the library and what draws with it. Packed they have
    a third of their size, and in a notebook, where a page is an attribute, no character that must be escaped."""
    drawing = f"{library()}\n{script()}"
    packed = base64.b64encode(gzip.compress(drawing.encode(), mtime=0)).decode()
    return f'const packed = "{packed}";\n{_UNPACK}', drawing


_UNPACK = """new Response(new Blob([Uint8Array.from(atob(packed), (one) => one.charCodeAt(0))]).stream()
.pipeThrough(new DecompressionStream("gzip"))).text().then((text) => {
  const made = document.createElement("script");
  made.textContent = text;
  document.body.append(made);
});"""


def page(title: str, *body: Child) -> bytes:
    """A whole document, in UTF-8. Secrets are removed."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_rules()),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", redact(title)),
        tag("style", Markup(CSS)),
    )
    content = Markup(redact(str(tag("main", NO_SCRIPT, body))))
    whole = tag("html", head, tag("body", content, tag("script", Markup(_scripts()[0]))), lang="en")
    return f"<!doctype html>\n{whole}\n".encode()


@functools.cache
def _rules() -> str:
    """Content-Security-Policy: nothing is loaded, and only these scripts run."""
    hashes = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in _scripts()]
    allowed = " ".join(f"'sha256-{one}'" for one in hashes)
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {allowed}; base-uri 'none'; "
        "form-action 'none'"
    )


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
