"""A rank computes longer because its own code does more, or waits: a hook, a longer batch, a sleep, a lock, a file or a request.

Runs anywhere: plain python and numpy. From processor time: a rank that does more uses the processor in the additional time,
one that waits does not, and neither waits for a processor.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydist.diagnosis._symptoms import Candidate, figure, slow_ranks
from raydist.diagnosis._window import Window, newest
from raydist.diagnosis.swapping import FAULT_S

SYMPTOM = "slow_compute"
CAUSE = "its own code does more than its peers', or waits"
LOOKS = "cpu_seconds in the additional time, once the delays that the kernel reports are subtracted"
COLUMNS = ("cpu_seconds", "run_delay_seconds", "stopped_count", "gc_seconds", "hooks_seconds", "major_faults_count")
THRESHOLDS = {"busy": ("0.6", "processor time over the time of computing; a waiting thread uses none")}
BUSY = 0.6
WEIGHT = 0.9
"""Of what nothing else explains: a cause that was measured goes first."""


def check(window: Window) -> Iterator[Candidate]:
    """What remains of the lost time."""
    cpu = window.recent("rank", "cpu_seconds")
    computes = newest(window.share("compute"))
    delay = window.recent("rank", "run_delay_seconds")
    explained = (
        ("run_delay_seconds", 1.0),
        ("gc_seconds", 1.0),
        ("hooks_seconds", 1.0),
        ("major_faults_count", FAULT_S),
    )
    values = [(window.recent("rank", column), each) for column, each in explained]
    held = np.where(np.isnan(window.held), window.recent("rank", "stopped_count"), window.held)
    for slow in slow_ranks(window, SYMPTOM):
        busy = float(cpu[slow.row] / max(computes[slow.row], 1e-3))
        kernel = sum(each * max(slow.excess(column), 0.0) for column, each in values)
        kernel += float(np.nan_to_num(held[slow.row]))
        gpu = "gpu" in window.culprit(slow.rank)
        rest = max(0.0, 1.0 - kernel / slow.lost)
        known = not np.isnan(busy) and not np.isnan(delay[slow.row]) and not gpu
        more = busy >= BUSY
        cause = (
            "its own code does more in each step"
            if more
            else "its own code waits: a sleep, a lock, a file or a request"
        )
        yield slow.because(
            window,
            "own_code",
            cause=cause if known else "its own code does more, or waits",
            explains=WEIGHT * rest * (1.0 if known else 0.4),
            evidence=[
                figure("processor seconds in a second of computing", busy, "node monitor: /proc/PID/stat"),
                figure(
                    "ready to run without a processor, seconds in a second",
                    float(delay[slow.row]),
                    "/proc/PID/schedstat",
                ),
            ],
            remedy=f"`raydist trace RUN` shows what rank {slow.rank} does in that time; look for hooks and for code that only runs "
            "on some ranks" + ("; compare the tokens of its batches" if more else ""),
            against=f"other causes are recorded for {1 - rest:.0%} of the lost time",
        )
