"""A clock that jumps: an injected fault of a rank, its agent, the driver or the run's monitor.

Runs in: those processes, in runs with that fault.
"""

from __future__ import annotations

import time


def jump(seconds: float) -> None:
    """Unix time of this process, as its Python code sees it, from now on; monotonic clocks stay."""
    now = time.time
    time.time = lambda: now() + seconds
