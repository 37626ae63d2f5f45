"""Checkpoints cost too much: the loop waits for them, or the storage is too slow for their interval.

Runs anywhere: plain python. From the events of the run's newest checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydist.diagnosis._symptoms import figure
from raydist.diagnosis._window import Window
from raydist.records import Finding

CAUSE = "checkpoints cost too much"
LOOKS = "stall_seconds and seconds of the newest checkpoints, over the time between them"
THRESHOLDS = {
    "stall": ("0.1 of the time between checkpoints", "twice the target of `raydist profile` (save)"),
    "write": ("1.0 of the time between checkpoints", "the next one is due before this one is on storage, and fails"),
    "checkpoints": (
        "3, and the median of the newest 3 intervals",
        "the first one allocates its buffers; one late write is no cost",
    ),
}
STALL, WRITE, LEAST = 0.1, 1.0, 3
NEWEST = 4


def check(window: Window) -> Iterator[Finding]:
    """One finding for the job."""
    begun = max((e.at for e in window.of("attempt_started", "first_step")), default=0.0)
    saved = [e for e in window.of("checkpoint_saved") if e.at > begun][-NEWEST:]
    if len(saved) < LEAST:
        return
    gaps = np.diff([e.at for e in saved])
    gap = float(np.median(gaps))
    stall = float(np.median([e.data["stall_seconds"] for e in saved[1:]]))
    took = float(np.median([e.data["seconds"] for e in saved[1:]]))
    steps = int(np.median(np.diff([e.data["step"] for e in saved])))
    if gap <= 0 or steps < 1:
        return
    writes = took / gap
    cost = stall / gap
    if cost < STALL and writes < WRITE:
        return
    # The time between two checkpoints that keeps the cost at half of the limit.
    want = max(stall / (STALL / 2), 1.5 * took)
    every = max(steps + 1, int(np.ceil(steps * want / gap)))
    size = float(np.median([e.data["bytes"] for e in saved]))
    slow = writes >= WRITE
    yield Finding(
        rule="checkpoint_cost",
        rank=None,
        severity="warning",
        what=f"a checkpoint every {steps} steps stops training for {cost:.0%} of the time, and takes {took:.1f} s to write, "
        f"{gap:.1f} s apart",
        figures={"stall": cost, "seconds": took, "apart_seconds": gap, "bytes": size, "every": every},
        remedy=f"set {window.named('checkpoint.every')}: {every}, which lowers the cost to about {cost * steps / every:.0%}"
        + ("; or use faster storage" if slow else "; or checkpoint.asynchronous: true"),
        cause=f"the storage takes {size / max(took, 1e-9) / 2**20:.1f} MiB/s"
        if slow
        else "the loop waits while the state is copied",
        culprit={"setting": window.named("checkpoint.every")},
        evidence=[
            figure("seconds that the loop waits for a checkpoint", stall, "events: checkpoint_saved"),
            figure("seconds to write it", took, "events: checkpoint_saved"),
            figure("seconds between two", gap, "events: checkpoint_saved"),
        ],
        confidence=0.9,
        lost=cost,
    )
