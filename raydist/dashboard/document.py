"""The document around the parts of a live page; parts are elements with ids, which live.js replaces when they change.

Runs anywhere. Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from raydist.dashboard.cache import VERSIONS
from raydist.redact import redact
from raydist.report.html.elements import Markup, join, tag
from raydist.report.html.page import NO_SCRIPT, library, missing, script
from raydist.report.html.style import CSS

LOOK = (
    CSS
    + """
nav{max-width:1240px;margin:0 auto;padding:14px 24px 0;font-size:13.5px}nav+main{padding-top:14px}
nav ol{list-style:none;display:flex;flex-wrap:wrap;gap:0 8px;margin:0;padding:0}nav li+li::before{content:"/ ";color:var(--quiet)}
nav #live{margin:0 0 0 auto;color:var(--quiet);max-width:none}
form.view{display:flex;flex-wrap:wrap;gap:10px 14px;align-items:end;margin-top:16px;font-size:13px}
form.view label{display:grid;gap:2px;color:var(--quiet);flex:0 1 auto}
input,select,button{font:inherit;font-size:14px;color:var(--ink);background:var(--sheet);border:1px solid var(--quiet);
border-radius:5px;padding:4px 8px;max-width:100%}
form.view :is(input,select,button){height:32px}input[type=number]{width:104px}button{cursor:pointer;padding:4px 14px}
.actions button{margin-right:10px}
.skip{position:absolute;left:-9999px}.skip:focus{left:8px;top:8px;background:var(--sheet);padding:6px 10px;z-index:10}
td .status{margin-left:0;vertical-align:baseline}tr[hidden]{display:none}
pre.log{max-height:360px;white-space:pre-wrap;overflow-wrap:anywhere}
ul.findings{padding-left:18px;margin:0}ul.findings li{margin-bottom:10px}ul.findings p{margin:0}
@media (max-width:640px){nav{padding:10px 10px 0}}
"""
)
"""The style sheet: that of the reports, and what only a live page has."""
LIVE_SCRIPT = Path(__file__).with_name("live.js").read_text(encoding="utf-8")
LIBRARY = f"/echarts-{hashlib.sha256(library().encode()).hexdigest()[:16]}.js"
"""The address of Apache ECharts: a browser keeps it, and asks for it again only when it is another one."""
SCRIPTS = {LIBRARY: library(), "/chart.js": script(), "/live.js": LIVE_SCRIPT}
"""Of each page, in this order."""
_KEPT = 16


@dataclass(frozen=True)
class Parts:
    """The parts of a page by their ids, in order, and since which version each has its present text. `title`: of the document;
    `ended`: whether nothing more is expected.
    """

    title: str
    parts: Mapping[str, str]
    since: Mapping[str, int]
    version: int
    ended: bool = False
    _encoded: dict[int, bytes] = field(default_factory=dict, init=False, repr=False, compare=False)

    def after(self, older: Parts | None) -> Parts:
        """With the versions of those parts of `older` that have not changed."""
        if older is None:
            return self
        same = {name: older.since[name] for name, text in self.parts.items() if older.parts.get(name) == text}
        return replace(self, since={**self.since, **same})

    def changed(self, version: int) -> dict[str, str]:
        """The parts that are newer than that version."""
        return {name: text for name, text in self.parts.items() if self.since[name] > version}

    def news(self, version: int) -> bytes:
        """JSON of what is newer than that version; made once for all browsers that have it."""
        if version not in self._encoded:
            newer = {
                "title": f"{self.title} - raydist",
                "ended": self.ended,
                "parts": self.changed(version),
                "order": [*self.parts],
            }
            if len(self._encoded) >= _KEPT:
                self._encoded.clear()
            self._encoded[version] = json.dumps(newer).encode()
        return self._encoded[version]


def parts(title: str, made: Mapping[str, Markup], ended: bool = False) -> Parts:
    """As they are sent: without secrets."""
    version = next(VERSIONS)
    shown = {name: redact(str(part)) for name, part in made.items()}
    return Parts(redact(title), shown, dict.fromkeys(made, version), version, ended)


def problem(title: str, words: str) -> Parts:
    """In place of a page that cannot be made: why."""
    return parts(title, {"head": tag("header", tag("h1", title), id="head"), "problem": wrong(words)})


def wrong(words: str) -> Markup:
    """A section that says what went wrong."""
    return tag("section", tag("h2", "Problem"), missing(words), id="problem")


def document(shown: Parts, version: str, path: Sequence[tuple[str, str]]) -> bytes:
    """The whole page. `version`: for the script's first request. `path`: (name, address) of what contains it, outermost first."""
    return _document(
        shown.title,
        tag(
            "nav",
            tag("ol", [tag("li", tag("a", name, href=address)) for name, address in path]),
            _STATE,
            aria_label="path",
        ),
        tag(
            "main",
            NO_SCRIPT,
            join([Markup(part) for part in shown.parts.values()]),
            id="parts",
            data_version=version,
            data_ended=shown.ended,
        ),
    )


def plain(title: str, words: str, refresh: str | None = None) -> bytes:
    """A page of one sentence. `refresh`: an address that follows at once."""
    head = tag("meta", http_equiv="refresh", content=f"0;url={refresh}") if refresh else None
    return _document(title, tag("main", tag("h1", title), tag("p", words)), head=head)


_STATE = tag("p", "", id="live", role="status")


def _document(title: str, *body: Markup, head: Markup | None = None) -> bytes:
    top = tag(
        "head",
        tag("meta", charset="utf-8"),
        head,
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("link", rel="stylesheet", href="/look.css"),
        tag("title", f"{title} - raydist"),
        [tag("script", src=path, defer=True) for path in SCRIPTS],
    )
    skip = tag("a", "skip to the content", href="#parts", class_="skip")
    return f"<!doctype html>\n{tag('html', top, tag('body', skip, *body), lang='en')}\n".encode()
