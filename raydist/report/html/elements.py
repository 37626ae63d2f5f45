"""Elements of HTML as text. Everything that is not an element already is escaped, so that text never becomes markup.

Runs anywhere. Pure.
"""

from __future__ import annotations

import html
from collections.abc import Iterable


class Markup(str):
    """Text that is HTML already. Only this module creates it from other text; `style.py` contains text written by hand."""

    __slots__ = ()


Child = object
"""Markup is kept as it is; a list stands for its children; None is empty; everything else is text."""


def tag(name: str, /, *children: Child, **attributes: object) -> Markup:
    """`<name attribute="...">children</name>`. In names of attributes `_` becomes `-`, and a trailing one is removed, as in
    `class_`. None and False omit an attribute, True gives it no value. Floats are rounded to two places.
    """
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def join(children: Iterable[Child]) -> Markup:
    """The children one after the other."""
    return Markup("".join(map(_text, children)))


def number(value: float) -> str:
    """Rounded to two places, without trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value != int(value) else str(int(value))


_VOID = frozenset({"meta", "link", "br", "input"})


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
