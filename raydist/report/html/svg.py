"""Elements of HTML and SVG as text. Whatever is not an element already is escaped, so that a name can never become one.

Runs anywhere. Pure.
"""

from __future__ import annotations

import html
from collections.abc import Iterable


class Markup(str):
    """Text that is HTML already. Only this module makes it out of other text, and `style.py` has some that is written by hand."""

    __slots__ = ()


Child = object
"""Markup stays as it is; a list's children each; None is nothing; all else is text."""


def tag(name: str, /, *children: Child, **attributes: object) -> Markup:
    """`<name attribute="...">children</name>`. In names of attributes `_` stands for `-`, and one at the end for nothing, as in
    `class_`. None and False leave an attribute out, True gives it no value. Floats are written to two places.
    """
    said = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{said}>")
    return Markup(f"<{name}{said}>{join(children)}</{name}>")


def join(children: Iterable[Child]) -> Markup:
    """One after the other."""
    return Markup("".join(map(_text, children)))


def number(value: float) -> str:
    """To two places, without zeros at the end."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value != int(value) else str(int(value))


_VOID = frozenset({"meta", "link", "br"})


def _text(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, (list, tuple)):
        return join(child)
    return html.escape(str(child))


def _attribute(key: str, value: object) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    if value is True:
        return f" {name}"
    return f' {name}="{html.escape(number(value) if isinstance(value, float) else str(value))}"'
