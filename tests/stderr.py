"""A command's stderr, prepared for comparison."""

from __future__ import annotations

import re

_STAGE = re.compile(r"\[ *\d+\.\d s\] |preparing the data: ")


def without_stages(stderr: str) -> str:
    """Without the lines in which `raydist train` reports its stages, `[  0.5 s] starting Ray`, and how far the data is prepared: a
    slow machine prints more of these."""
    return "".join(line for line in stderr.splitlines(keepends=True) if not _STAGE.match(line))
