"""A rank computes longer because Python's garbage collector runs: many objects are made or kept in its steps.

Runs anywhere: plain python and numpy.
"""

from __future__ import annotations

from functools import partial

from raydist.diagnosis._symptoms import measured

SYMPTOM = "slow_compute"
CAUSE = "Python's garbage collector runs"
LOOKS = "gc_seconds of the rank, less its peers'"
COLUMNS = ("gc_seconds",)

check = partial(
    measured,
    rule="gc_pauses",
    column="gc_seconds",
    cause="Python's garbage collector took {more:.0%} of the time",
    evidence=("seconds of collection in a second", "rank: gc.callbacks"),
    remedy=(
        "keep fewer objects in the steps of your model and data: arrays instead of lists; gc.freeze() after they are "
        "built, or gc.set_threshold(100_000, 50, 50)"
    ),
    against="its collector took {more:.1%} of the time more than its peers'",
)
