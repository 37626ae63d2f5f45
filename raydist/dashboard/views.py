"""What a reader asks of a run's page, from the address: `?first=100&last=500&smooth=20&y=log&with=other&rank=3&attempt=2`.

Runs anywhere. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlencode

from raydist.errors import UsageError
from raydist.parsing import quoted
from raydist.report.html.elements import Markup, tag

MOST_BESIDE = 5
"""Number of other runs in the curves: as many as there are colours left."""
_DIGITS = 12
Scale = Literal["auto", "log", "linear"]
_SCALES: dict[str, Scale] = {"auto": "auto", "log": "log", "linear": "linear"}


@dataclass(frozen=True)
class RunView:
    """Steps of the curves, means over `smooth` steps, the scale of their y axes, other runs of the same storage beside this one,
    and the rank and the attempt (None: the newest) whose output is shown."""

    first: int = 1
    last: int | None = None
    smooth: int = 1
    y: Scale = "auto"
    beside: tuple[str, ...] = ()
    rank: int = 0
    attempt: int | None = None


def parse(query: Mapping[str, str]) -> RunView:
    """The view that a query asks for. Raises UsageError that names the field."""
    y = query.get("y") or "auto"
    if y not in _SCALES:
        raise UsageError(f"y: {quoted(y)!r} is no scale", "use auto, log or linear")
    beside = tuple(dict.fromkeys(name for one in query.get("with", "").split(",") if (name := one.strip())))
    if len(beside) > MOST_BESIDE:
        raise UsageError(f"with: {len(beside)} runs", f"name at most {MOST_BESIDE}")
    view = RunView(
        _number(query, "first", 1, 1),
        _number(query, "last", 0, 1) or None,
        _number(query, "smooth", 1, 1),
        _SCALES[y],
        beside,
        _number(query, "rank", 0, 0),
        _number(query, "attempt", 0, 1) or None,
    )
    if view.last is not None and view.last < view.first:
        raise UsageError(f"last: {view.last} is before first: {view.first}", "give a later step")
    return view


def form(view: RunView) -> Markup:
    """The controls, which work without a script: the address is the view."""
    scales = [tag("option", name, value=name, selected=name == view.y) for name in _SCALES]
    fields = [
        ("first step", tag("input", type="number", name="first", min=1, value=view.first if view.first > 1 else "")),
        ("last step", tag("input", type="number", name="last", min=1, value=view.last or "")),
        ("mean over steps", tag("input", type="number", name="smooth", min=1, value=view.smooth if view.smooth > 1 else "")),
        ("y axis", tag("select", scales, name="y")),
        ("beside runs, separated by commas", tag("input", name="with", value=", ".join(view.beside), autocomplete="off")),
        ("output of rank", tag("input", type="number", name="rank", min=0, value=view.rank)),
        ("in attempt", tag("input", type="number", name="attempt", min=1, value=view.attempt or "")),
    ]  # fmt: skip
    labels = [tag("label", words, field) for words, field in fields]
    cut = view.first > 1 or view.last is not None
    whole = tag("a", "all steps", href=f"?{urlencode(_query(view))}") if cut else None
    return tag("form", labels, tag("button", "Show"), whole, class_="view", id="view")


def _query(view: RunView) -> dict[str, str]:
    """The view's query, of all steps."""
    attempt = {"attempt": str(view.attempt)} if view.attempt else {}
    return {"smooth": str(view.smooth), "y": view.y, "with": ",".join(view.beside), "rank": str(view.rank), **attempt}


def _number(query: Mapping[str, str], name: str, default: int, low: int) -> int:
    text = query.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS) or int(text) < low:
        raise UsageError(
            f"{name}: {quoted(text)!r} is not a whole number from {low} on", "leave it empty for the default"
        )
    return int(text)
