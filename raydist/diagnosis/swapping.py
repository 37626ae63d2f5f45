"""A rank computes longer because its memory is read back from a disk: swap, or a mapped file that memory has no room for.

Runs anywhere: plain python and numpy.
"""

from __future__ import annotations

from functools import partial

from raydist.diagnosis._symptoms import measured

SYMPTOM = "slow_compute"
CAUSE = "its memory is read back from a disk"
LOOKS = "major page faults of the rank, at 1 ms each, less its peers'"
COLUMNS = ("major_faults_count",)
THRESHOLDS = {
    "seconds of a fault": (
        "1 ms",
        "a random read of 4 KiB from a cloud's network disk; an SSD takes 0.1 ms, a disk 10 ms",
    ),
}
FAULT_S = 1e-3

check = partial(
    measured,
    rule="swapping",
    column="major_faults_count",
    cause="it waits for a disk: {more:.0f} pages a second are read back into its memory",
    evidence=("major page faults a second", "node monitor: /proc/PID/stat"),
    remedy=(
        "free memory on that host (swapoff -a shows what lacks), lower data.prefetch, or use "
        "parallel.strategy: zero2 or zero3"
    ),
    against="it has {more:.1f} major page faults a second more than its peers",
    each=FAULT_S,
)
