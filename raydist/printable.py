"""Removes control characters and escape sequences from text that came from a file or a rank, before a terminal shows it.

Runs anywhere. Imports nothing of raydist. A terminal executes what is in such text: it sets its title, moves the cursor, hides
other lines, or answers as if the user had typed.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

T = TypeVar("T")

_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f]).*?(?:\x07|\x1b\\|$)"  # OSC, DCS, ...: title, clipboard
    r"|\x1b[ -/]*[0-~]?"
    r"|\r(?=\n)",
    re.DOTALL,
)
# C0 without tab and newline, DEL, C1; line separators, and marks that reverse the order of characters.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def printable(value: T) -> T:
    """`value` without control characters, but tabs and newlines, in its strings; recursive for dicts, lists and tuples."""
    return _printable(value)  # type: ignore[no-any-return]


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isprintable() else _CONTROL.sub("", _ESCAPES.sub("", value))
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_printable(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
