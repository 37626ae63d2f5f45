"""The memory of a GPU is fragmented: the allocator has reserved much more than tensors use, and must free and retry.

Runs anywhere: plain python and numpy.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydist.diagnosis._symptoms import figure
from raydist.diagnosis._window import RECENT, Window
from raydist.records import Finding

CAUSE = "the GPU's memory is fragmented"
LOOKS = "inactive blocks over reserved memory, while the allocator retries"
COLUMNS = ("reserved_bytes", "inactive_bytes", "alloc_retries_count")
THRESHOLDS = {
    "inactive": ("0.2 of the reserved memory", "a healthy run's split blocks take a few per cent"),
    "retries": ("in half of the newest parts", "each one synchronises the device; a single one occurs at a new shape"),
}
SHARE = 0.2


def check(window: Window) -> Iterator[Finding]:
    """The rank with the most."""
    retries = window.series("rank", "alloc_retries_count")[:, -RECENT:]
    inactive, reserved = window.recent("rank", "inactive_bytes"), window.recent("rank", "reserved_bytes")
    if not len(retries):
        return
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where((retries > 0).sum(axis=1) >= RECENT // 2, inactive / reserved, np.nan)
    if np.isnan(share).all():
        return
    row = int(np.nanargmax(share))
    if share[row] < SHARE:
        return
    rank = window.keys("rank")[row]
    yield Finding(
        rule="fragmentation",
        rank=rank,
        severity="warning",
        what=f"rank {rank}: {share[row]:.0%} of the GPU memory that torch has reserved is in blocks that fit no tensor, and the "
        f"allocator retries",
        figures={"inactive": float(share[row]), "reserved_bytes": float(reserved[row])},
        remedy="set PYTORCH_CUDA_ALLOC_CONF to expandable_segments:True in cluster.env, and keep shapes the same from step to step",
        cause="tensors of changing sizes have split its blocks",
        culprit=window.culprit(rank) | {"setting": "cluster.env"},
        evidence=[
            figure("inactive over reserved memory", float(share[row]), "telemetry: inactive_bytes, reserved_bytes"),
            figure("retries a second", float(retries[row].mean()), "telemetry: alloc_retries_count"),
        ],
        others=[{"cause": "a leak", "against": "memory that leaks is in use, and these blocks are not"}],
        confidence=0.85,
    )
