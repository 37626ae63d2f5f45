"""A rank computes longer because its control group has used up its CPU quota: the kernel holds it until the next period.

Runs anywhere: plain python and numpy. The figure is the kernel's own: `throttled_usec` of cpu.stat, summed while the group is held.
"""

from __future__ import annotations

from functools import partial

from raydist.diagnosis._symptoms import measured

SYMPTOM = "slow_compute"
CAUSE = "its control group is held at its CPU quota"
LOOKS = "throttled_seconds of the rank, less that of its peers, as a share of the time that is lost"
COLUMNS = ("throttled_seconds",)

check = partial(
    measured,
    rule="cpu_throttled",
    column="throttled_seconds",
    cause="its control group was held at its CPU quota for {more:.0%} of the time",
    evidence=("throttled seconds in a second", "node monitor: cpu.stat of the rank's group"),
    remedy=(
        "raise the quota of its container (cpu.max; in Kubernetes limits.cpu, or set none), or lower "
        "cluster.cpus_per_worker to what the quota gives"
    ),
    against="its group was held for {more:.1%} of the time more than its peers'",
)
