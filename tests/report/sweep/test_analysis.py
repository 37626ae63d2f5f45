"""The analysis of a sweep's results, on results with a known optimum."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from raydist.report.sweep.analysis import Fit, Refusal, best, edge, fit, noise
from raydist.report.sweep.stats import quantile

LRS = [1e-4, 3e-4, 1e-3, 3e-3, 1e-2]


def parabola(x: float, optimum: float, curvature: float = 0.1, height: float = 2.0) -> float:
    return height + curvature * math.log(x / optimum) ** 2


def fits(*arguments: Any) -> list[Fit]:
    found = fit(*arguments)
    assert not isinstance(found, Refusal), found
    return found


@settings(deadline=None)
@given(
    optimum=st.floats(1e-5, 1e-1),
    curvature=st.floats(1e-3, 10),
    height=st.floats(0.1, 10),
    shift=st.floats(0.2, 5),
)
def test_exact_parabolas_are_found(optimum: float, curvature: float, height: float, shift: float) -> None:
    """Each group's own vertex is found, from its own slope, for a maximum and for a minimum. Without noise the interval is a
    point."""
    x = LRS * 2
    groups = [0] * 5 + [7] * 5
    y = [parabola(v, optimum * (shift if g else 1), curvature, height) for v, g in zip(x, groups, strict=True)]
    for values, mode in ((y, "min"), ([-v for v in y], "max")):
        found = fits(x, values, groups, mode)
        assert [f.group for f in found] == [0, 7]
        for one, true in zip(found, (optimum, optimum * shift), strict=True):
            assert one.optimum == pytest.approx(true, rel=1e-4)
            assert one.low <= one.optimum * (1 + 1e-9)
            assert one.high >= one.optimum * (1 - 1e-9)
            assert (one.low, one.high) == pytest.approx((true, true), rel=1e-2)
            near_an_end = min(abs(math.log(true / end)) for end in (LRS[0], LRS[-1])) < 1e-3
            assert near_an_end or one.inside is (LRS[0] < true < LRS[-1])


@settings(deadline=None)
@given(
    scale=st.floats(0.1, 100),
    move=st.floats(0.01, 100),
    up=st.floats(-5, 5),
    seed=st.integers(0, 10**6),
)
def test_units_make_no_difference(scale: float, move: float, up: float, seed: int) -> None:
    """Another unit of the loss changes no interval; another unit of the learning rate scales it."""
    draws = random.Random(seed)
    y = [parabola(v, 1e-3) + draws.gauss(0, 0.02) for v in LRS * 2]
    one = fit(LRS * 2, y, [0] * 10, "min")
    other = fit([move * v for v in LRS * 2], [scale * v + up for v in y], [0] * 10, "min")
    assume(not isinstance(one, Refusal))
    assert not isinstance(one, Refusal)
    assert not isinstance(other, Refusal)
    assert (other[0].optimum, other[0].low, other[0].high) == pytest.approx(
        (move * one[0].optimum, move * one[0].low, move * one[0].high), rel=1e-5
    )


@pytest.mark.parametrize("spread", [0.02, 0.2, 0.6])
def test_intervals_cover_the_optimum(spread: float) -> None:
    """Of 1000 noisy sweeps at most 5% give a wrong interval, within four standard errors; exactly 5% if none is refused.

    Fieller's set covers the optimum in 95% of all cases. An unbounded set gives no interval, and counts as covering.
    """
    draws = random.Random(1)
    told = held = 0
    for _ in range(1000):
        y = [parabola(v, 7e-4) + draws.gauss(0, spread) for v in LRS]
        found = fit(LRS, y, [0] * 5, "min")
        if not isinstance(found, Refusal):
            told += 1
            held += found[0].low <= 7e-4 <= found[0].high
    missed, error = (told - held) / 1000, math.sqrt(0.95 * 0.05 / 1000)
    assert missed < 0.05 + 4 * error
    assert told == 1000 if spread == 0.02 else 0 < told < 1000
    if spread == 0.02:
        assert missed > 0.05 - 4 * error


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), curvature=st.floats(0.01, 1))
def test_what_bends_the_wrong_way_is_refused(seed: int, curvature: float) -> None:
    """A concave curve has no minimum, whatever its noise."""
    draws = random.Random(seed)
    y = [parabola(v, 1e-3, -curvature) + draws.gauss(0, curvature / 100) for v in LRS]
    found = fit(LRS, y, [0] * 5, "min")
    assert isinstance(found, Refusal)
    assert "not convex" in found.because


def test_what_does_not_bend_is_refused() -> None:
    """A straight line; and pure noise, except for the 2.5% in which it looks convex."""
    straight = [2 + 0.1 * math.log(v) for v in LRS]
    assert isinstance(fit(LRS, straight, [0] * 5, "min"), Refusal)
    draws = random.Random(2)
    refused = sum(
        isinstance(fit(LRS, [draws.gauss(2, 0.1) for _ in LRS], [0] * 5, "min"), Refusal) for _ in range(1000)
    )
    # Two-sided at 95%, and only one side counts: 97.5% are refused.
    assert abs(refused / 1000 - 0.975) < 4 * math.sqrt(0.975 * 0.025 / 1000)


@pytest.mark.parametrize(
    ("x", "groups", "because"),
    [
        ([1e-3, 1e-2] * 3, [0, 0, 1, 1, 2, 2], "fewer than three values"),
        ([1e-4, 1e-3, 1e-2], [0, 0, 0], "3 results determine the parabola"),
        ([1e-4, 1e-3, 1e-2, 1e-3], [0, 0, 0, 1], "4 results determine the parabola"),
    ],
)
def test_too_little_is_refused(x: list[float], groups: list[int], because: str) -> None:
    """The refusal has the reason."""
    found = fit(x, [parabola(v, 1e-3) for v in x], groups, "min")
    assert isinstance(found, Refusal)
    assert because in found.because


@settings(deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_fit_is_least_squares(seed: int) -> None:
    """Compared with the normal equations of the whole model: the optimum, and ends at which Fieller's quadratic is zero.

    The groups differ: every value twice, three values, two values, and a single value, which only adds to the noise estimate.
    """
    draws = random.Random(seed)
    x = [*LRS, *LRS, 2e-4, 1e-3, 5e-3, 1e-4, 1e-2, 1e-3, 1e-3, 1e-3]
    groups = [0] * 10 + [1] * 3 + [2] * 2 + [3] * 3
    y = [parabola(v, 1e-3 * 2**g) + draws.gauss(0, 0.05) for v, g in zip(x, groups, strict=True)]
    found = fits(x, y, groups, "min")
    z = np.log(x)
    one = [np.array([g == k for g in groups], dtype=float) for k in range(4)]
    design = np.stack([*one, *(column * z for column in one[:3]), z * z], axis=1)
    inverse = np.linalg.inv(design.T @ design)
    solved = inverse @ design.T @ y
    covariance = inverse * float(np.sum((y - design @ solved) ** 2)) / (len(y) - 8)
    c, t = solved[7], quantile(0.975, len(y) - 8)
    assert [f.group for f in found] == [0, 1, 2]
    for fitted in found:
        b, i = solved[4 + fitted.group], 4 + fitted.group
        assert math.log(fitted.optimum) == pytest.approx(-b / (2 * c), rel=1e-6)
        for end in (math.log(fitted.low), math.log(fitted.high)):
            variance = covariance[i, i] + 4 * end * covariance[i, 7] + 4 * end**2 * covariance[7, 7]
            assert abs(b + 2 * c * end) == pytest.approx(t * math.sqrt(variance), rel=1e-5)


def test_groups_judge_their_noise_together() -> None:
    """Three values fix a group's parabola, but three such groups with a common curvature leave two degrees of freedom for the
    noise."""
    draws = random.Random(3)
    x, groups = LRS[:3] * 3, [0] * 3 + [1] * 3 + [2] * 3
    y = [parabola(v, 3e-4 * 2**g) + draws.gauss(0, 0.002) for v, g in zip(x, groups, strict=True)]
    found = fits(x, y, groups, "min")
    assert [f.low <= 3e-4 * 2**f.group <= f.high for f in found] == [True, True, True]
    assert [f.inside for f in found] == [True, True, False]


@pytest.mark.parametrize(
    ("tried", "value", "expected"),
    [
        ([1e-4, 1e-3, 1e-2], 1e-2, ("highest", "log", 0.1)),
        ([1e-4, 1e-3, 1e-2], 1e-4, ("lowest", "log", 1e-5)),
        ([1e-4, 1e-3, 1e-2], 1e-3, None),
        ([1e-4, 5e-5, 1e-5], 1e-4, ("highest", "log", 2e-4)),
        ([64, 128, 256], 256, ("highest", "log", 512)),
        ([64, 128, 256], 64, ("lowest", "log", 32)),
        ([0.0, 0.1, 0.2], 0.2, ("highest", "linear", 0.3)),
        ([0.1, 0.2, 0.3], 0.3, ("highest", "linear", 0.4)),
        ([32, 48, 64, 128], 32, ("lowest", "log", 16)),
        ([32, 48, 64], 64, ("highest", "linear", 80)),
        ([2, 3], 3, ("highest", "linear", 4)),
        ([2, 4], 4, ("highest", "log", 8)),
        ([1, 2, 4], 1, ("lowest", "log", None)),
        ([5.0], 5.0, None),
        ([True, False], True, None),
        (["cosine", "wsd"], "wsd", None),
        ([1e-3, None], 1e-3, None),
    ],
)
def test_edges(tried: list[Any], value: Any, expected: tuple[str, str, float | None] | None) -> None:
    """The value to try next is one step further, in the axis's own spacing; values that are not numbers have no edge."""
    found = edge("f", tried, value)
    if expected is None or expected[2] is None:
        assert found is None
    else:
        assert found is not None
        assert (found.side, found.spacing, found.value) == (*expected[:2], float(value))
        assert found.next == pytest.approx(expected[2])


def test_the_best_and_what_is_as_good() -> None:
    """NaN and missing values are no candidates; of equal ones the first is best. Only points with several seeds can be within the
    noise."""
    assert best([3.0, None, 2.0, math.nan, 2.0], "min") == 2
    assert best([3.0, None, 2.0], "max") == 0
    assert best([None, math.nan], "min") is None
    assert best([0.0, 1.0], "min") == 0
    values = [[1.0, 1.2, 1.1], [1.1, 1.3, 1.0], [3.0, 3.1, 3.2], [1.1]]
    assert noise(values, 0) == ([1], True)
    assert noise([[1.0], [2.0]], 0) == ([], False)
