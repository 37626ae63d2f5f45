"""What a supervisor does with a stop, without Ray; tests/end_to_end/test_trace.py has a real one."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from raydist.cluster.run.restart_loop import StopRequest
from raydist.cluster.run.supervisor import Supervisor


@pytest.mark.parametrize(
    ("asked", "known", "last", "again"),
    [(True, None, False, True), (True, "stop", False, False), (False, None, False, False), (True, None, True, False)],
)
def test_a_monitor_that_was_killed_hears_of_a_stop_again(
    asked: bool, known: str | None, last: bool, again: bool
) -> None:
    """It comes back without the driver's word, which an attempt that starts meanwhile would never get; not after the run's end."""
    told: list[str | None] = []
    made: Any = object.__new__(Supervisor)
    made._injector, made._begun, made._shown, made._seen = None, 0.0, 0.0, 0
    made._stop_request = StopRequest(signals=[signal.SIGINT] if asked else [])
    snapshot = {"next": 1, "events": [], "record": None, "command": known}
    made._line = SimpleNamespace(snapshot=lambda seen: snapshot, command=told.append)
    made._view = SimpleNamespace(update=lambda snapshot: None)
    made._show(last)
    assert told == (["stop"] if again else [])
