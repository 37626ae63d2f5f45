"""A rank computes longer because its control group has used up its CPU quota: the kernel holds it until the next period.

Runs anywhere: plain python and numpy. The figure is the kernel's own: `throttled_usec` of cpu.stat, summed while the group is held.
"""

from __future__ import annotations

from collections.abc import Iterator

from raydist.diagnosis._symptoms import Candidate, measured
from raydist.diagnosis._window import Window

SYMPTOM = "slow_compute"
CAUSE = "its control group is held at its CPU quota"
LOOKS = "throttled_seconds of the rank, less that of its peers, as a share of the time that is lost"
COLUMNS = ("throttled_seconds",)
THRESHOLDS: dict[str, tuple[str, str]] = {}


def check(window: Window) -> Iterator[Candidate]:
    """The share of the lost time that the group was held."""
    return measured(
        window,
        "cpu_throttled",
        "throttled_seconds",
        "its control group was held at its CPU quota for {more:.0%} of the time",
        ("throttled seconds in a second", "node monitor: cpu.stat of the rank's group"),
        "raise the quota of its container (cpu.max; in Kubernetes limits.cpu, or set none), or lower "
        "cluster.cpus_per_worker to what the quota gives",
        "its group was held for {more:.1%} of the time more than its peers'",
    )
