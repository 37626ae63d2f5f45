"""A rank computes longer because its process is stopped and continued from outside: SIGSTOP, a debugger, a freezer, a checkpointer.

Runs anywhere: plain python and numpy. The node monitor sees the state of the process once a second, so the share of readings in
which it was stopped is an estimate; a row of the rank that is late says the same.
"""

from __future__ import annotations

from collections.abc import Iterator

from raydist.diagnosis._symptoms import Candidate, figure, slow_ranks
from raydist.diagnosis._window import RECENT, Window

SYMPTOM = "slow_compute"
CAUSE = "its process is stopped again and again"
LOOKS = "the readings in which the process was in state T (stopped_count)"
COLUMNS = ("stopped_count",)
THRESHOLDS = {"least": ("1 reading", "a rank that is slow for another reason is never in that state")}
SURE = 0.95


def check(window: Window) -> Iterator[Candidate]:
    """SURE if the process was seen stopped."""
    rates = window.recent("rank", "stopped_count")
    for slow in slow_ranks(window, SYMPTOM):
        more = max(slow.excess(rates), 0.0)
        seen = more * RECENT * window.part_s
        yield slow.because(
            window,
            "process_stopped",
            cause=f"its process was stopped in {seen:.0f} of the readings of {RECENT * window.part_s:.0f} s",
            explains=SURE if seen > 0.5 else 0.0,
            evidence=[figure("readings in state T, a second", float(rates[slow.row]), "node monitor: /proc/PID/stat")],
            remedy="find who stops it: a debugger or profiler that attaches, a job manager's SIGSTOP, docker pause, a VM migration",
            against="it was never seen stopped",
        )
