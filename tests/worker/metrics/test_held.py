"""How long a process was held from outside, with real signals; and what else makes a sleep late."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from raydist.worker.metrics.held import TICK_S, HeldClock, held

HOLD = """
import threading, time
from raydist.worker.faults.host_pressure import pause
from raydist.worker.metrics.held import HeldClock

clock, event, begun = HeldClock(), threading.Event(), time.monotonic()
if clock.seconds is None:
    raise SystemExit("this kernel has no schedstat")
pause(1.0, 0.3, 100)  # the first stop may end before the clock waits
while clock.seconds < 0.5:
    clock.wait(event, 0.5)
print(clock.seconds, time.monotonic() - begun)
"""


def test_a_stop_is_counted() -> None:
    """A stop of one second by another process adds at least half of it, and not more than has passed."""
    run = subprocess.run([sys.executable, "-c", HOLD], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    counted, passed = map(float, run.stdout.split())
    assert 0.5 <= counted <= passed


@pytest.mark.parametrize(
    ("late", "delay", "switches", "faults", "expected"),
    [
        (0.5, 0.01, 4, 0, 0.49 + TICK_S / 2),  # SIGSTOP
        (0.5, 0.48, 4, 0, 0.0),  # no processor
        (0.5, 0.01, 90, 0, 0.0),  # the GIL: one switch each 5 ms
        (0.5, 0.01, 4, 1, 0.0),  # a page from a disk
        (0.04, 0.0, 1, 0, 0.0),  # a late timer
        (5.0, 2.0, 30, 0, 3.0 + TICK_S / 2),
    ],
)
def test_only_what_nothing_else_explains(
    late: float, delay: float, switches: int, faults: int, expected: float
) -> None:
    """Waits for a processor, for the GIL and for a disk are no holds."""
    assert held(late, delay, switches, faults) == pytest.approx(expected)


def test_without_the_kernels_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The column is left out, and the wait is the event's."""
    monkeypatch.setattr("raydist.worker.metrics.held.os.open", lambda *given: _missing())
    clock, event = HeldClock(), threading.Event()
    assert clock.seconds is None
    assert not clock.wait(event, 0.001)
    event.set()
    assert clock.wait(event, 60)


def _missing() -> int:
    raise FileNotFoundError("schedstat")
