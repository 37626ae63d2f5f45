"""Student's t: intervals of means, and whether two means differ. Plain Python.

Runs anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

LEVEL = 0.95
"""The confidence level of all intervals and tests."""


class Interval(NamedTuple):
    """A mean and its confidence interval; both ends are None for a single value."""

    mean: float
    low: float | None
    high: float | None


def interval(values: Sequence[float]) -> Interval:
    """The mean of at least one value, and its interval at LEVEL by Student's t."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return Interval(mean, None, None)
    half = quantile((1 + LEVEL) / 2, len(values) - 1) * math.sqrt(variance(values) / len(values))
    return Interval(mean, mean - half, mean + half)


def variance(values: Sequence[float]) -> float:
    """The sample variance (with n - 1) of at least two values."""
    mean = math.fsum(values) / len(values)
    return math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)


def differ(one: Sequence[float], other: Sequence[float]) -> bool | None:
    """Whether the means of two samples differ at LEVEL, by Welch's test; None if either has fewer than two values.

    Degrees of freedom by Welch and Satterthwaite, Biometrika 34 (1947).
    """
    if len(one) < 2 or len(other) < 2:
        return None
    a, b = variance(one) / len(one), variance(other) / len(other)
    gap = abs(math.fsum(one) / len(one) - math.fsum(other) / len(other))
    if a + b == 0:
        return gap > 0
    freedom = (a + b) ** 2 / (a**2 / (len(one) - 1) + b**2 / (len(other) - 1))
    return cdf(gap / math.sqrt(a + b), freedom) > (1 + LEVEL) / 2


@lru_cache(maxsize=1000)
def quantile(p: float, freedom: float) -> float:
    """The `p`-quantile, 0 < p < 1, of Student's t with `freedom` > 0 degrees of freedom; relative error below 1e-10."""
    assert 0 < p < 1, p
    if p < 0.5:
        return -quantile(1 - p, freedom)
    high = 1.0
    while cdf(high, freedom) < p:
        high *= 2
    low = 0.0
    while high - low > 1e-11 * high:
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if cdf(middle, freedom) < p else (low, middle)
    return (low + high) / 2


def cdf(t: float, freedom: float) -> float:
    """Probability that Student's t is below `t`."""
    whole = freedom + t * t
    tail = _beta(freedom / whole, t * t / whole, freedom / 2, 0.5) / 2
    return 1 - tail if t > 0 else tail


def _beta(x: float, rest: float, a: float, b: float) -> float:
    """The regularized incomplete beta function I_x(a, b), 0 <= x <= 1. `rest` is 1 - x, which is exact where x is near 1."""
    if x <= 0 or rest <= 0:
        return float(rest <= 0)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest))
    # The fraction converges fast on this side of the mean; on the other side the symmetry of the function is used.
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(x, a, b) / a
    return 1 - front * _fraction(rest, b, a) / b


def _fraction(x: float, a: float, b: float) -> float:
    """Its continued fraction (Abramowitz and Stegun 26.5.8), evaluated forward by the method of Lentz."""
    tiny = 1e-300
    c, d = 1.0, 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > tiny else tiny)
    result = d
    for m in range(1, 10_000):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 + numerator * d
            c = 1 + numerator / c
            d = 1 / (d if abs(d) > tiny else tiny)
            c = c if abs(c) > tiny else tiny
            result *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return result
