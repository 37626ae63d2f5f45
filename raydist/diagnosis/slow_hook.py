"""A rank computes longer because a hook of the job takes time: it prints, sends, or computes something in each step.

Runs anywhere: plain python and numpy.
"""

from __future__ import annotations

from collections.abc import Iterator

from raydist.diagnosis._symptoms import Candidate, measured
from raydist.diagnosis._window import Window

SYMPTOM = "slow_compute"
CAUSE = "a hook of the job takes time"
LOOKS = "hooks_seconds of the rank, less its peers'"
COLUMNS = ("hooks_seconds",)
THRESHOLDS: dict[str, tuple[str, str]] = {}


def check(window: Window) -> Iterator[Candidate]:
    """The share of the lost time in hooks."""
    return measured(
        window,
        "slow_hook",
        "hooks_seconds",
        "the job's hooks took {more:.0%} of the time",
        ("seconds in hooks in a second", "rank: around each call of a hook"),
        "do less in on_step, or only every hundredth step; hand slow work to a thread of the hook",
        "hooks took {more:.1%} of the time more than its peers'",
    )
