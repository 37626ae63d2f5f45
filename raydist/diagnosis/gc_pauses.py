"""A rank computes longer because Python's garbage collector runs: many objects are made or kept in its steps.

Runs anywhere: plain python and numpy.
"""

from __future__ import annotations

from collections.abc import Iterator

from raydist.diagnosis._symptoms import Candidate, measured
from raydist.diagnosis._window import Window

SYMPTOM = "slow_compute"
CAUSE = "Python's garbage collector runs"
LOOKS = "gc_seconds of the rank, less its peers'"
COLUMNS = ("gc_seconds",)
THRESHOLDS: dict[str, tuple[str, str]] = {}


def check(window: Window) -> Iterator[Candidate]:
    """The share of the lost time in the collector."""
    return measured(
        window,
        "gc_pauses",
        "gc_seconds",
        "Python's garbage collector took {more:.0%} of the time",
        ("seconds of collection in a second", "rank: gc.callbacks"),
        "keep fewer objects in the steps of your model and data: arrays instead of lists; gc.freeze() after they are "
        "built, or gc.set_threshold(100_000, 50, 50)",
        "its collector took {more:.1%} of the time more than its peers'",
    )
