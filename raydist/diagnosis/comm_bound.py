"""Communication takes much of every rank's time, and no rank or link is slow: the job sends too much, or in too small parts.

Runs anywhere: plain python and numpy.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydist.diagnosis import nvlink_narrow, slow_link, wrong_network
from raydist.diagnosis._symptoms import all_wait, figure, slow_ranks
from raydist.diagnosis._window import RECENT, Window
from raydist.extension_plans import buckets
from raydist.records import Finding
from raydist.run.telemetry_schema import OPS
from raydist.spec.comm import NONE

CAUSE = "the job sends too much for its links, or in too small messages"
LOOKS = "the least share of exposed communication of all ranks over the whole window, and the mean size of a message"
COLUMNS = (*(f"{op}_{what}" for op in OPS for what in ("count", "bytes")), "run_delay_seconds", "nic_out_bytes")
THRESHOLDS = {
    "exposed": (
        "0.5 of the time, in three quarters of the window",
        "twice the speed is lost; the target is 0.1 (`raydist profile`)",
    ),
    "small": ("256 KiB a message", "below it latency, not bandwidth, sets the time (docs/how-to/bench.md)"),
    "processors": (
        "0.2 of the time without one",
        "on fewer processors than ranks, waiting for a peer is waiting for its processor",
    ),
}
EXPOSED, PARTS, SMALL, DELAY = 0.5, 0.75, 256 << 10, 0.2
_REMEDIES = {
    "parallel.bucket_mb": "set parallel.bucket_mb: auto, so that fewer and larger messages are sent",
    "comm.compress": "set comm.compress: bf16 (half of the bytes) or int8 (a quarter)",
    "train.micro_batch": "raise {}, so that fewer micro-batches are accumulated, or use a faster link",
}
"""By the setting that is to be changed."""


def check(window: Window) -> Iterator[Finding]:
    """One finding for the job, where several nodes send."""
    share = window.share("exposed")
    if share.shape[0] < 2 or share.shape[1] < 2 * RECENT or all_wait(window, "exposed") < EXPOSED:
        return
    if len(window.keys("node")) < 2 and not window.keys("gpu"):
        return  # ranks that share one host's processors wait for one another, not for a link
    if slow_ranks(window, "slow_compute") or slow_ranks(window, "slow_data"):
        return
    # Full sockets name a link also where it was always slow, which slow_link does not report.
    if slow_link.full(window) or any(one for rule in (wrong_network, nvlink_narrow) for one in rule.check(window)):
        return
    least = share.min(axis=0)
    known = least[~np.isnan(least)]
    if len(known) < 2 * RECENT or (known >= EXPOSED).mean() < PARTS:
        return
    if (np.nan_to_num(window.recent("rank", "run_delay_seconds")) > DELAY).any():
        return
    exposed = float(np.median(known))
    sent = sum(np.nan_to_num(window.recent("rank", f"{op}_bytes")) for op in OPS)
    count = sum(np.nan_to_num(window.recent("rank", f"{op}_count")) for op in OPS)
    size = float(np.sum(sent) / max(np.sum(count), 1e-9))
    small = size < SMALL
    setting = "train.micro_batch"
    bucketed = buckets(window.setting("parallel.strategy", "ddp")) and window.setting("parallel.bucket_mb") != "auto"
    if small and bucketed and not window.of_script:
        setting = "parallel.bucket_mb"
    elif not small and window.setting("comm.compress", NONE) == NONE and not window.of_script:
        setting = "comm.compress"
    yield Finding(
        rule="comm_bound",
        rank=None,
        severity="info",
        what=f"all ranks wait {exposed:.0%} of the time for communication, and no rank or link is slower than the others",
        figures={"exposed": exposed, "bytes_per_message": size},
        remedy=_REMEDIES[setting].format(window.named(setting)),
        cause="small messages" if small else "the bytes of its gradients",
        culprit={"setting": window.named(setting)},
        evidence=[
            figure("least exposed communication of all ranks", exposed, "telemetry: median over the window"),
            figure("bytes of a message", size, "telemetry: bytes over count of all collectives"),
        ],
        others=[
            {
                "cause": "one rank or one link is slow",
                "against": "all ranks wait alike, and no node's sockets are fuller",
            }
        ],
        confidence=0.7,
        lost=exposed,
    )
