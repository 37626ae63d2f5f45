"""A rank waits for its data longer than its peers, which then wait for it.

Runs anywhere: plain python and numpy. A rank's wait for data is in no other rank's numbers: peers wait for it in their collectives.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydist.diagnosis._symptoms import Candidate, figure, slow_ranks
from raydist.diagnosis._window import Window

SYMPTOM = "slow_data"
CAUSE = "its loader is slow"
LOOKS = "data_seconds of the rank against its peers'; loader_waited_seconds over loader_seconds; the disks of its node"
COLUMNS = ("disk_read_bytes", "disk_waited_seconds", "loader_seconds", "loader_waited_seconds")
THRESHOLDS = {"waits": ("0.5 of the loader's time", "whether it computes or waits for most of it")}
WAITS = 0.5


def check(window: Window) -> Iterator[Candidate]:
    """The rank, whether its loader computes or waits, and the use of its disks."""
    reads = window.of_nodes(window.recent("node", "disk_read_bytes"))
    stalls = window.of_nodes(window.recent("node", "disk_waited_seconds"))
    makes, waited = (window.recent("rank", f"loader_{name}") for name in ("seconds", "waited_seconds"))
    more = f"raise {window.named('data.prefetch')}"
    for slow in slow_ranks(window, SYMPTOM):
        share = float(waited[slow.row] / makes[slow.row]) if makes[slow.row] > 0 else float("nan")
        rate, stalled = float(reads[slow.row]), float(stalls[slow.row])
        waits = share >= WAITS
        if np.isnan(share):
            cause = "its loader does not deliver in time"
        elif waits:
            cause = f"its loader waits for {share:.0%} of its time: for storage, a request or a lock"
        else:
            cause = f"its loader computes for {1 - share:.0%} of its time, or waits for a processor"
        disks = "" if np.isnan(rate) else f"; the disks of its node are read at {rate / 2**20:.0f} MiB/s"
        disks += "" if np.isnan(stalled) else f", and something waits for them for {stalled:.0%} of the time"
        yield slow.because(
            window,
            "slow_loader",
            cause=cause + (disks if waits or np.isnan(share) else ""),
            explains=1.0,
            evidence=[
                figure(
                    "share of its time in which the loader waits",
                    share,
                    "rank: /proc/thread-self/schedstat of the loader",
                ),
                figure("bytes read from its node's disks a second", rate, "node monitor: /proc/diskstats"),
                figure("share of time in which the node waits for a disk", stalled, "node monitor: /proc/pressure/io"),
            ],
            remedy=("" if window.of_script else "prepare the data ahead (`raydist data prepare`), or ") + more
            if share < WAITS
            else f"put the data on a faster disk of that host, or {more}",
            against="",
        )
