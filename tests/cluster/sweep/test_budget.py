"""The hours that a sweep has used, over drivers that ended and drivers that were killed, and when it reaches a limit."""

from __future__ import annotations

from typing import Any

import pytest

from raydist.cluster.sweep.budget import before, reached
from raydist.records import Event
from raydist.report.sweep.standing import Spent
from raydist.spec.sweep.models import LimitsSpec

HOUR = 3600.0


def event(hour: float, kind: str, **data: Any) -> Event:
    return Event(kind, hour * HOUR, data)


def test_spent_over_drivers() -> None:
    """The first driver is killed at its last event, the second one ends; the time between them does not count. The trial has 4
    GPUs and 2 workers."""
    events = [
        event(1, "began"),
        event(1, "started", cell="a", workers=2, gpus=4.0),
        event(2, "started", cell="b", workers=1, gpus=0.0),
        event(10, "began"),
        event(10, "started", cell="a", workers=2, gpus=4.0),
        event(10.5, "finished", cell="a"),
        event(11, "ended"),
    ]
    spent = before(events[:3])
    assert (spent.hours, spent.gpu_hours, spent.worker_hours) == pytest.approx((1.0, 4.0, 2.0))
    spent = before(events)
    assert (spent.hours, spent.gpu_hours, spent.worker_hours) == pytest.approx((2.0, 6.0, 3.0))
    assert before([]) == Spent()


def test_limits() -> None:
    """The first limit that is reached, by name; None without limits."""
    limits = LimitsSpec.model_validate({"hours": 2, "gpu_hours": 10})
    assert reached(limits, Spent(1.9, 9.9)) is None
    assert reached(limits, Spent(2.0, 0.0)) == "limits.hours is 2"
    assert reached(limits, Spent(1.0, 10.0)) == "limits.gpu_hours is 10"
    assert reached(LimitsSpec.model_validate({}), Spent(1e6, 1e6)) is None
