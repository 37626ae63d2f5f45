"""When checkpoints are due: a fixed number of steps, or the interval that loses least by the measured costs."""

from __future__ import annotations

import math

import pytest

from raydist.checkpoint.interval import FIRST, CheckpointInterval, young_daly


@pytest.mark.parametrize(("every", "expected"), [(4, [4, 8, 10]), (None, [10]), ("auto", [10])])
def test_due(every: object, expected: list[int]) -> None:
    """Of ten steps; always at the end."""
    made = CheckpointInterval(every, 0, 1e6)  # type: ignore[arg-type]
    assert [step for step in range(1, 11) if made.due(step, step == 10)] == expected


def test_auto_follows_the_costs() -> None:
    """Before a cost is known the interval doubles. Then it is Young's for the median stall and step; a slow write makes it longer,
    and a run of more failures shorter. Steps with other work do not count."""
    made = CheckpointInterval("auto", 100, mtbf_s=36_000.0)
    assert made.next == 100 + FIRST
    assert made.after(110) == 120
    assert made.after(120) == 140
    for _ in range(5):
        made.stepped(0.5, False)
        made.stepped(30.0, True)
    made.saved(seconds=10.0, stall_s=0.2)
    apart = young_daly(0.2, 36_000.0)
    assert apart == pytest.approx(math.sqrt(2 * 0.2 * 36_000), rel=0.01)
    assert made.after(140) == 140 + math.ceil(apart / 0.5)
    often = CheckpointInterval("auto", 0, mtbf_s=360.0)
    often.stepped(0.5, False)
    often.saved(seconds=10.0, stall_s=0.2)
    assert often.after(10) == 10 + 30, "1.5 x 10 s of writing"
