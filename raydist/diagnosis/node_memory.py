"""A node is about to run out of memory: the kernel, or the container's limit, will kill one of its processes.

Runs anywhere: plain python and numpy.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydist.diagnosis._symptoms import figure
from raydist.diagnosis._window import RECENT, Window
from raydist.records import Finding

CAUSE = "a node is about to run out of memory"
LOOKS = "memory in use over the limit, and when the limit is reached at the present growth"
COLUMNS = ("memory_used_bytes", "memory_total_bytes", "anon_bytes")
THRESHOLDS = {
    "used": ("0.9, and full within 120 s at the growth of the newest parts", "time for one checkpoint and a stop"),
    "full": ("0.98", "Ray's memory monitor kills workers at 0.95 (RAY_memory_usage_threshold), the kernel at 1"),
    "growth": ("1% of the limit in the newest parts", "less is noise"),
}
USED, FULL, SECONDS, GROWTH = 0.9, 0.98, 120.0, 0.01


def check(window: Window) -> Iterator[Finding]:
    """Each such node, with the rank that holds most."""
    used, total = window.series("node", "memory_used_bytes"), window.recent("node", "memory_total_bytes")
    anon = window.recent("rank", "anon_bytes")
    for row, node in enumerate(window.keys("node")):
        if not total[row] > 0:
            continue
        last = used[row, -RECENT:] / total[row]
        if len(last) < RECENT or np.isnan(last).any() or last[-1] < USED:
            continue
        growth = float(last[-1] - last[0])
        seconds = (1.0 - last[-1]) / growth * (RECENT - 1) * window.part_s if growth > 0 else float("inf")
        if last[-1] < FULL and (growth < GROWTH or seconds > SECONDS):
            continue
        ranks = [
            (anon[i], r)
            for i, r in enumerate(window.keys("rank"))
            if window.who("rank", r)["node"] == node and anon[i] > 0
        ]
        rank = max(ranks)[1] if ranks else None
        host = window.who("node", node)["host"]
        when = f", full in {seconds:.0f} s at this growth" if np.isfinite(seconds) else ""
        yield Finding(
            rule="node_memory",
            rank=rank,
            severity="critical",
            what=f"{host} ({node}) uses {last[-1]:.1%} of its memory{when}: the kernel will kill a process",
            figures={"kind": str(node), "used": float(last[-1]), "seconds": seconds if np.isfinite(seconds) else -1.0},
            remedy=f"stop at a checkpoint now (raydist stop RUN), then lower {window.named('train.micro_batch')} or "
            f"{window.named('data.prefetch')}, use {window.named('parallel.strategy')}: zero2 or zero3, "
            "or give the node more memory",
            cause="its processes use more memory than it has",
            culprit={"host": host, "node": node, **({"rank": rank} if rank is not None else {})},
            evidence=[
                figure(
                    "memory in use over the limit",
                    float(last[-1]),
                    "node monitor: /proc/meminfo, the container's limit",
                ),
                figure("growth over the newest parts", growth, "node monitor"),
                figure(
                    "bytes of the largest rank there", max(ranks)[0] if ranks else float("nan"), "telemetry: anon_bytes"
                ),
            ],
            confidence=0.9,
        )
