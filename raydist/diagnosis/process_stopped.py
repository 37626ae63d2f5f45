"""A rank computes longer because its process is stopped and continued from outside: SIGSTOP, a debugger, a freezer, a checkpointer.

Runs anywhere: plain python and numpy. The node monitor sees the state of the process once a second, so the share of readings in
which it was stopped is an estimate; a row of the rank that is late says the same.
"""

from __future__ import annotations

from collections.abc import Iterator

from raydist.diagnosis._symptoms import Candidate, figure, slow_ranks
from raydist.diagnosis._window import BIN_S, RECENT, Window

SYMPTOM = "slow_compute"
CAUSE = "its process is stopped again and again"
LOOKS = "the readings in which the process was in state T (stopped_count)"
COLUMNS = ("stopped_count",)
THRESHOLDS = {"least": ("2 readings", "one reading may be a debugger that attached for a moment")}
LEAST = 2


def check(window: Window) -> Iterator[Candidate]:
    """All of the lost time if the process was seen stopped at least LEAST times."""
    rates = window.recent("rank", "stopped_count")
    for slow in slow_ranks(window, SYMPTOM):
        more = max(slow.excess(rates), 0.0)
        seen = more * RECENT * window.part_s
        yield slow.because(
            window,
            "process_stopped",
            cause=f"its process was stopped in {seen:.0f} of the readings of {RECENT * window.part_s:.0f} s",
            explains=min(1.0, 2 * more / slow.lost) if seen > LEAST - 0.5 else 0.0,
            evidence=[figure("readings in state T, a second", float(rates[slow.row]), "node monitor: /proc/PID/stat")],
            remedy="find who stops it: a debugger or profiler that attaches, a job manager's SIGSTOP, docker pause, a VM migration",
            against="it was never seen stopped"
            if not seen
            else f"it was seen stopped {seen:.0f} times in {RECENT * BIN_S:.0f} s",
        )
