"""A rank computes longer because other processes, or its hypervisor, have the processor.

Runs anywhere: plain python and numpy. Run delay: the time that the rank's main thread was ready to run and had no processor
(/proc/PID/schedstat). The kernel counts the time at a CPU quota as run delay too, so that part is subtracted.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydist.diagnosis._symptoms import Candidate, figure, slow_ranks
from raydist.diagnosis._window import Window

SYMPTOM = "slow_compute"
CAUSE = "other processes take its processor"
LOOKS = "run_delay_seconds of the rank without the time at a quota, less its peers', plus the steal of its node"
COLUMNS = ("run_delay_seconds", "throttled_seconds", "steal_seconds", "cpu_util", "cpu_count")


def check(window: Window) -> Iterator[Candidate]:
    """The share of the lost time that the rank was ready to run and did not."""
    delays = window.recent("rank", "run_delay_seconds") - np.nan_to_num(window.recent("rank", "throttled_seconds"))
    nodes = window.keys("node")
    for slow in slow_ranks(window, SYMPTOM):
        node = window.culprit(slow.rank).get("node")
        stolen = used = float("nan")
        if node in nodes:
            row = nodes.index(node)
            stolen = float((window.recent("node", "steal_seconds") / window.recent("node", "cpu_count"))[row])
            used = float(window.recent("node", "cpu_util")[row])
        more = max(slow.excess(delays), 0.0)
        by_host = 0.0 if np.isnan(stolen) else stolen
        hypervisor = by_host > more
        cause = (
            f"its hypervisor gave its processors to others for {by_host:.0%} of the time"
            if hypervisor
            else f"it was ready to run for {more:.0%} of the time while other processes had the processor"
        )
        yield slow.because(
            window,
            "cpu_stolen",
            cause=cause,
            explains=max(more, by_host) / slow.lost,
            evidence=[
                figure(
                    "ready to run, seconds in a second", float(delays[slow.row]), "node monitor: /proc/PID/schedstat"
                ),
                figure("processors of its node in use", used, "node monitor: /proc/stat"),
                figure("processor time that the hypervisor took", stolen, "node monitor: /proc/stat, steal"),
            ],
            remedy="move the run to a host with guaranteed processors"
            if hypervisor
            else "look for the processes on that host (top), give the ranks processors of their own (cluster.cpus_per_worker, "
            "taskset), or leave the host out",
            against=f"it waited for a processor for {more:.1%} of the time more than its peers",
        )
