"""A rank computes longer because a hook of the job takes time: it prints, sends, or computes something in each step.

Runs anywhere: plain python and numpy.
"""

from __future__ import annotations

from functools import partial

from raydist.diagnosis._symptoms import measured

SYMPTOM = "slow_compute"
CAUSE = "a hook of the job takes time"
LOOKS = "hooks_seconds of the rank, less its peers'"
COLUMNS = ("hooks_seconds",)

check = partial(
    measured,
    rule="slow_hook",
    column="hooks_seconds",
    cause="the job's hooks took {more:.0%} of the time",
    evidence=("seconds in hooks in a second", "rank: around each call of a hook"),
    remedy="do less in on_step, or only every hundredth step; hand slow work to a thread of the hook",
    against="hooks took {more:.1%} of the time more than its peers'",
)
