"""The learning rate of each step."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.errors import UserError
from raydist.spec import OptimSpec, ScheduleSpec
from raydist.worker.optim.schedule import lr_at, peak_lr, warmup_steps

NAMES = ("constant", "linear", "cosine", "wsd", "inverse-sqrt")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # 20 steps, 4 of warm-up, floor 0.1, wsd decays over the last 8: steps 1, 2, 4, 5, 12, 16, 20
        ("constant", (0.25, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0)),
        ("linear", (0.25, 0.5, 1.0, 0.94375, 0.55, 0.325, 0.1)),
        ("cosine", (0.25, 0.5, 1.0, 0.991353, 0.55, 0.231802, 0.1)),
        ("wsd", (0.25, 0.5, 1.0, 1.0, 1.0, 0.55, 0.1)),
        ("inverse-sqrt", (0.25, 0.5, 1.0, 0.894427, 0.57735, 0.5, 0.447214)),
    ],
)
def test_table(name, expected):
    """Each shape at the first step, during warm-up, at the peak, half way and at the end, as computed by hand."""
    schedule = ScheduleSpec(name=name, warmup=4, floor=0.1, decay=0.4)
    got = [lr_at(step, 20, schedule, peak=1.0) for step in (1, 2, 4, 5, 12, 16, 20)]
    assert got == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("warmup", "total", "steps"),
    [(0.1, 200, 20), (0.0, 200, 0), (1, 200, 1), (30, 200, 30), (0.5, 1, 0), (300, 200, 200)],
)
def test_warmup_is_a_fraction_or_steps(warmup, total, steps):
    """Below 1 it is a fraction of all steps, from 1 on a number of steps, and never more than there are."""
    assert warmup_steps(total, ScheduleSpec(warmup=warmup)) == steps


@pytest.mark.parametrize("name", NAMES)
def test_no_warmup_starts_high(name):
    """Without warm-up the first step has the peak, or one step's decay less."""
    schedule = ScheduleSpec(name=name, warmup=0, decay=1.0)
    assert 0.9 < lr_at(1, 20, schedule, peak=1.0) <= 1.0


@pytest.mark.parametrize("step", [0, 21])
def test_a_step_outside_the_run_is_a_bug(step):
    """Steps count from 1 to the total; others are refused."""
    with pytest.raises(AssertionError, match="of 20"):
        lr_at(step, 20, ScheduleSpec(), 1.0)


@given(
    name=st.sampled_from(NAMES),
    total=st.integers(1, 400),
    warmup=st.one_of(st.floats(0, 0.99), st.integers(1, 400).map(float)),
    floor=st.floats(0, 1),
    decay=st.floats(0.01, 1),
    peak=st.floats(1e-6, 10),
)
def test_shape_holds_everywhere(name, total, warmup, floor, decay, peak):
    """Positive while it rises, exactly the peak at the end of the warm-up, never above it, never rising after it, and at the
    floor in the last step for shapes that have one."""
    schedule = ScheduleSpec(name=name, warmup=warmup, floor=floor, decay=decay)
    first = warmup_steps(total, schedule)
    rates = [lr_at(step, total, schedule, peak) for step in range(1, total + 1)]
    slack = peak * 1e-12
    assert all(0 <= r <= peak + slack for r in rates)
    if first:
        assert rates[first - 1] == peak
        assert all(a < b for a, b in pairwise(rates[:first]))
    assert all(b <= a + slack for a, b in pairwise(rates[max(first - 1, 0) :]))
    if total > first and name in ("linear", "cosine"):
        assert rates[-1] == pytest.approx(floor * peak, rel=1e-9, abs=slack)
    if name == "wsd" and total > first and round(decay * total) > 0:
        assert rates[-1] == pytest.approx(floor * peak, rel=1e-9, abs=slack)


@pytest.mark.parametrize(("rule", "expected"), [("none", 1e-3), ("linear", 4e-3), ("sqrt", 2e-3)])
def test_peak_lr_follows_the_batch(rule, expected):
    """lr was tuned for a batch of 32; this run has 128."""
    assert peak_lr(OptimSpec(lr=1e-3, scale_lr=rule, base_batch=32), 128) == pytest.approx(expected)


def test_peak_lr_without_a_base_is_refused():
    """The spec refuses it too; a spec that bypasses validation does not give a wrong lr."""
    spec = OptimSpec(scale_lr="sqrt", base_batch=8).model_copy(update={"base_batch": None})
    with pytest.raises(UserError, match=r"no optim\.base_batch"):
        peak_lr(spec, 128)
