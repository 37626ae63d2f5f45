"""All ranks of a node are held back by one CPU quota: no rank is slower than the others, and all are slow.

Runs anywhere: plain python and numpy. A quota counts as far as the ranks' main threads waited for a processor: other threads
may be held without a loss.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydist.diagnosis._symptoms import LEAST_LOST, figure
from raydist.diagnosis._window import RECENT, Window
from raydist.records import Finding

CAUSE = "a CPU quota holds back all ranks of a node"
LOOKS = "the least of throttled_seconds and run_delay_seconds of all ranks of a node"
COLUMNS = ("throttled_seconds", "run_delay_seconds")
THRESHOLDS = {
    "lost": (f"{LEAST_LOST:g} of the time, on each rank and in each of the newest parts", "as for a slow rank")
}


def check(window: Window) -> Iterator[Finding]:
    """One finding for each node."""
    both = np.minimum(window.series("rank", "throttled_seconds"), window.series("rank", "run_delay_seconds"))[
        :, -RECENT:
    ]
    if not (np.nan_to_num(both) >= LEAST_LOST).any():
        return
    nodes: dict[str, list[int]] = {}
    for row, rank in enumerate(window.keys("rank")):
        nodes.setdefault(window.who("rank", rank).get("node", ""), []).append(row)
    for node, rows in nodes.items():
        lost = float(both[rows].mean(axis=1).min())
        if not (both[rows] >= LEAST_LOST).all():
            continue
        host = window.who("rank", window.keys("rank")[rows[0]])["host"]
        yield Finding(
            rule="node_throttled",
            rank=None,
            severity="warning",
            what=f"the ranks on {host} are held back by a CPU quota for {lost:.0%} of the time",
            figures={"kind": node, "lost": lost, "ranks": len(rows)},
            remedy="raise the quota of the container (cpu.max; in Kubernetes limits.cpu, or set none), or start fewer threads: "
            "OMP_NUM_THREADS: 1 in cluster.env, data.prefetch: 1",
            cause="the quota of their control group is used up in each period",
            culprit={"host": host, "node": node},
            evidence=[
                figure(
                    "throttled and without a processor, seconds in a second", lost, "cpu.stat and /proc/PID/schedstat"
                )
            ],
            others=[
                {"cause": "other processes take the processors", "against": "the kernel counts this time as throttled"}
            ],
            confidence=0.9,
            lost=lost,
        )
