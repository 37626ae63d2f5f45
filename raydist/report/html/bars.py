"""A whole and its parts: one bar, a table of the parts, and a timeline.

Runs anywhere. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raydist.report.html.elements import Markup, tag

_WORD = 0.055
"""Smallest share of the bar with room for its own figure."""


@dataclass(frozen=True)
class Part:
    """`look`: the CSS class that fills it; `text`: its amount as text; `about`: what it includes."""

    name: str
    value: float
    look: str
    text: str
    about: str = ""


def chart(title: str, parts: Sequence[Part], pieces: Sequence[tuple[float, str, str]] = ()) -> Markup:
    """A figure: the parts side by side, each as wide as its share, and all of them in a table. Shares are of the whole.

    `pieces`: (amount, look, words) ordered by time, for a thin bar below.
    """
    whole = sum(part.value for part in parts) or 1.0
    bar = [
        _piece(part.value / whole, part.look, f"{part.name}: {part.value / whole:.1%}, {part.text}")
        for part in parts
        if part.value > 0
    ]
    rows = [
        tag(
            "tr",
            tag("th", tag("i", class_=f"key {part.look}"), part.name, scope="row"),
            tag("td", f"{part.value / whole:.1%}", class_="number"),
            tag("td", part.text, class_="number"),
            tag("td", part.about, class_="about"),
        )
        for part in parts
    ]
    spoken = f"{title}: " + ", ".join(f"{part.name} {part.value / whole:.1%}" for part in parts if part.value > 0)
    times = sum(value for value, _, _ in pieces) or 1.0
    return tag(
        "figure",
        tag("div", bar, class_="bar", role="img", aria_label=spoken),
        tag("div", [_piece(value / times, look, words, False) for value, look, words in pieces], class_="timeline")
        if pieces
        else None,
        tag("div", tag("table", tag("tbody", rows)), class_="wide"),
        class_="parts",
    )


def _piece(share: float, look: str, words: str, labelled: bool = True) -> Markup:
    inside = tag("b", f"{share:.0%}") if labelled and share >= _WORD else None
    return tag("span", inside, class_=look, style=f"flex-grow:{share:.6f}", title=words)
