"""All ranks wait for data: the storage, the loader or its settings are too slow for the model.

Runs anywhere: plain python and numpy.
"""

from __future__ import annotations

from collections.abc import Iterator

from raydist.diagnosis._symptoms import all_wait, figure, slow_ranks
from raydist.diagnosis._window import Window, median_of
from raydist.diagnosis.slow_loader import WAITS
from raydist.records import Finding

CAUSE = "the data of all ranks comes too slowly"
LOOKS = (
    "the least share of time that any rank waits for data, and for how much of their time its loaders wait themselves"
)
COLUMNS = ("loader_seconds", "loader_waited_seconds")
THRESHOLDS = {
    "data": ("0.2 of the time, on every rank", "the target is 0.05 (`raydist profile`); a fifth is worth a change")
}
SHARE = 0.2


def check(window: Window) -> Iterator[Finding]:
    """One finding for the job."""
    waits = all_wait(window, "data")
    if waits < SHARE or slow_ranks(window, "slow_data"):
        return
    prefetch = None if window.of_script else window.setting("data.prefetch")
    made, waited = (window.recent("rank", f"loader_{name}") for name in ("seconds", "waited_seconds"))
    share = median_of(waited[made > 0] / made[made > 0])  # NaN: not recorded
    more = f"raise {window.named('data.prefetch')}" + (f" (now {prefetch})" if prefetch is not None else "")
    ahead = "" if window.of_script else "prepare the data ahead (`raydist data prepare`)"
    if share >= WAITS:
        cause = f"the loaders wait for {share:.0%} of their time: for storage"
        remedy = f"move the data closer, or {more}"
    elif share < WAITS:
        cause = f"the loaders compute for {1 - share:.0%} of their time"
        remedy = ahead or more
    else:
        cause = "the loaders of all ranks do not deliver in time"
        remedy = f"{ahead}{', ' if ahead else ''}{more}, or move the data closer"
    yield Finding(
        rule="data_bound",
        rank=None,
        severity="warning",
        what=f"every rank waits at least {waits:.0%} of the time for data",
        figures={"data": waits},
        remedy=remedy,
        cause=cause,
        culprit={"setting": window.named("data.prefetch")},
        evidence=[
            figure("least share of time waiting for data", waits, "telemetry: data_seconds"),
            figure(
                "share of its time in which a loader waits", share, "rank: /proc/thread-self/schedstat of the loader"
            ),
        ],
        others=[{"cause": "one rank's loader is slow", "against": "all ranks wait alike"}],
        confidence=0.8,
        lost=waits,
    )
