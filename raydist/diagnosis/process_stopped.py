"""A rank computes longer because its process is held from outside: SIGSTOP, a debugger, a freezer, a checkpointer.

Runs anywhere: plain python and numpy. The rank measures how long it was held (raydist/worker/metrics/held.py): no statistics over
steps are needed. The node monitor sees the state of the process once a second, which tells a signal or a debugger from a freezer.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydist.diagnosis._symptoms import Candidate, figure, slow_ranks
from raydist.diagnosis._window import BIN_S, RECENT, Window

SYMPTOM = "slow_compute"
CAUSE = "its process is held from outside"
LOOKS = "held_seconds of the rank without the steal of its node, and the readings in which it was in state T (stopped_count)"
COLUMNS = ("held_seconds", "stopped_count", "steal_seconds", "cpu_count")
THRESHOLDS = {
    "held": ("as the symptom", "a process that is not suspended shows no delay; sleeps are late by milliseconds"),
    "least": (
        "1 reading in state T, where held_seconds is not recorded",
        "a rank that is slow otherwise is never in it",
    ),
}
SURE = 0.95


def check(window: Window) -> Iterator[Candidate]:
    """The share of the lost time that it was held; SURE if that is not recorded, and the process was seen stopped."""
    rates = window.gained("rank", "stopped_count")
    for slow in slow_ranks(window, SYMPTOM):
        held = float(window.held[slow.row])
        seen = np.nan_to_num(rates[slow.row]) * RECENT * BIN_S > 0.5
        who = "a signal or a debugger stopped it" if seen else "a freezer, a debugger or a pause of its machine held it"
        yield slow.because(
            window,
            "process_stopped",
            cause=f"its process was held from outside{'' if np.isnan(held) else f' for {held:.0%} of the time'}: {who}",
            explains=(SURE if seen else 0.0) if np.isnan(held) else SURE * held / slow.lost,
            evidence=[
                figure("held, seconds in a second", held, "rank: its own sleeps, /proc/self/task/TID/schedstat"),
                figure("readings in state T, a second", float(rates[slow.row]), "node monitor: /proc/PID/stat"),
            ],
            remedy="find who holds it: a debugger or profiler that attaches, a job manager's SIGSTOP, docker pause, a VM migration",
            against="it was never seen stopped" if np.isnan(held) else f"it was held for {held:.1%} of the time",
        )
