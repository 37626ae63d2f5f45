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
LOOKS = "data_seconds of the rank against its peers', with the reads of its node's disks"
COLUMNS = ("disk_read_bytes", "major_faults_count")
THRESHOLDS: dict[str, tuple[str, str]] = {}


def check(window: Window) -> Iterator[Candidate]:
    """The rank, with the use of its disks."""
    reads = window.recent("node", "disk_read_bytes")
    nodes = window.keys("node")
    for slow in slow_ranks(window, SYMPTOM):
        node = window.culprit(slow.rank).get("node")
        rate = float(reads[nodes.index(node)]) if node in nodes else float("nan")
        disks = "" if np.isnan(rate) else f"; the disks of its node are read at {rate / 2**20:.0f} MiB/s"
        yield slow.because(
            window,
            "slow_loader",
            cause=f"its loader does not deliver in time{disks}",
            explains=1.0,
            evidence=[figure("bytes read from its node's disks a second", rate, "node monitor: /proc/diskstats")],
            remedy="raise data.prefetch, prepare the data ahead (`raydist data prepare`), or put it on a faster disk of that host",
            against="",
        )
