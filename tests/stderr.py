"""What a command said on stderr, as tests compare it."""

from __future__ import annotations

import re

_STAGE = re.compile(r"\[ *\d+\.\d s\] ")


def without_stages(stderr: str) -> str:
    """Less the lines in which `raydist train` tells its stages: `[  0.5 s] starting Ray`."""
    return "".join(line for line in stderr.splitlines(keepends=True) if not _STAGE.match(line))
