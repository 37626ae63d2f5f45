"""Student's t, compared with printed tables and closed forms."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.report.sweep.stats import cdf, differ, interval, quantile


@pytest.mark.parametrize(
    ("freedom", "p", "expected"),
    [
        (1, 0.975, 12.706), (2, 0.975, 4.303), (3, 0.975, 3.182), (4, 0.975, 2.776), (5, 0.975, 2.571), (9, 0.975, 2.262),
        (10, 0.95, 1.812), (20, 0.995, 2.845), (30, 0.975, 2.042), (60, 0.975, 2.000), (120, 0.975, 1.980), (1, 0.9995, 636.619),
    ],
)  # fmt: skip
def test_quantiles_are_those_of_printed_tables(freedom: int, p: float, expected: float) -> None:
    """They agree to the three digits of a table."""
    assert quantile(p, freedom) == pytest.approx(expected, abs=6e-4)


@settings(deadline=None)
@given(t=st.floats(-50, 50))
def test_closed_forms(t: float) -> None:
    """One degree of freedom is Cauchy's distribution, two have a closed form, very many give the normal distribution."""
    assert cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-12)
    assert cdf(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-12)
    assert cdf(t, 1e6) == pytest.approx(statistics.NormalDist().cdf(t), abs=1e-6)


@settings(deadline=None)
@given(p=st.floats(0.001, 0.999), freedom=st.floats(0.5, 500))
def test_quantile_inverts_cdf(p: float, freedom: float) -> None:
    """It inverts it, and is symmetric."""
    assert cdf(quantile(p, freedom), freedom) == pytest.approx(p, abs=1e-9)
    assert quantile(p, freedom) == pytest.approx(-quantile(1 - p, freedom), rel=1e-6, abs=1e-9)


def test_an_interval_by_hand() -> None:
    """Of 1, 2, 3: mean 2, standard error 1/sqrt(3), 4.303 of them in each direction; a single value has no interval."""
    mean, low, high = interval([1, 2, 3])
    assert (mean, low, high) == pytest.approx((2, 2 - 4.3027 / math.sqrt(3), 2 + 4.3027 / math.sqrt(3)), abs=1e-3)
    assert interval([5.0]) == (5.0, None, None)
    assert interval([5.0, 5.0]) == (5.0, 5.0, 5.0)


def test_intervals_cover() -> None:
    """Of 2000 samples of three from a normal distribution, 95% of the intervals contain its mean, within four standard errors."""
    draws = random.Random(0)
    held = 0
    for _ in range(2000):
        _, low, high = interval([draws.gauss(3, 2) for _ in range(3)])
        assert low is not None and high is not None  # noqa: PT018
        held += low <= 3 <= high
    assert abs(held / 2000 - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 2000)


def test_differ() -> None:
    """Samples far apart relative to their spread differ, close ones do not; a single value gives no answer."""
    assert differ([1.0, 1.1, 0.9], [2.0, 2.1, 1.9]) is True
    assert differ([1.0, 2.0, 3.0], [1.5, 2.5, 3.5]) is False
    assert differ([1.0, 2.0], [5.0]) is None
    assert differ([1.0, 1.0], [1.0, 1.0]) is False
    assert differ([1.0, 1.0], [2.0, 2.0]) is True


def test_welch_by_hand() -> None:
    """Two samples of unequal spread exactly at the limit: 1.96 against the quantile for 2.04 degrees of freedom, 4.25."""
    wide, narrow = [0.0, 10.0, 5.0], [14.0, 14.1, 14.2]
    error = math.sqrt(25 / 3 + 0.01 / 3)
    t = 9.1 / error
    assert 2.0 < t < 4.25
    assert differ(wide, narrow) is False
    assert differ(wide, [v + 4.3 * error - 9.1 + 0.2 for v in narrow]) is True
