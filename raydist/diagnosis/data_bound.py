"""All ranks wait for data: the storage, the loader or its settings are too slow for the model.

Runs anywhere: plain python and numpy.
"""

from __future__ import annotations

from collections.abc import Iterator

from raydist.diagnosis._symptoms import all_wait, figure, slow_ranks
from raydist.diagnosis._window import Window
from raydist.records import Finding

CAUSE = "the data of all ranks comes too slowly"
LOOKS = "the least share of time that any rank waits for data"
COLUMNS = ("disk_read_bytes",)
THRESHOLDS = {
    "data": ("0.2 of the time, on every rank", "the target is 0.05 (`raydist profile`); a fifth is worth a change")
}
SHARE = 0.2


def check(window: Window) -> Iterator[Finding]:
    """One finding for the job."""
    waits = all_wait(window, "data")
    if waits < SHARE or slow_ranks(window, "slow_data"):
        return
    prefetch = window.setting("data.prefetch")
    yield Finding(
        rule="data_bound",
        rank=None,
        severity="warning",
        what=f"every rank waits at least {waits:.0%} of the time for data",
        figures={"data": waits},
        remedy="prepare the data ahead (`raydist data prepare`), raise data.prefetch"
        + (f" (now {prefetch})" if prefetch is not None else "")
        + ", or move the data closer",
        cause="the loaders of all ranks do not deliver in time",
        culprit={"setting": "data.prefetch"},
        evidence=[figure("least share of time waiting for data", waits, "telemetry: data_seconds")],
        others=[{"cause": "one rank's loader is slow", "against": "all ranks wait alike"}],
        confidence=0.8,
        lost=waits,
    )
