"""A command's stderr, prepared for comparison."""

from __future__ import annotations

import re

_STAGE = re.compile(r"\[ *\d+\.\d s\] ")


def without_stages(stderr: str) -> str:
    """Without the lines in which `raydist train` reports its stages: `[  0.5 s] starting Ray`."""
    return "".join(line for line in stderr.splitlines(keepends=True) if not _STAGE.match(line))
