"""Analysis of a sweep's results: points as good as the best, a best value at the edge of its axis, and the optimum.

Runs anywhere. Plain numpy; pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from raydist.report.sweep import stats

Mode = Literal["min", "max"]


def best(means: Sequence[float | None], mode: Mode) -> int | None:
    """Index of the best mean, the first of equal ones; None if there is none."""
    known = [i for i, mean in enumerate(means) if mean is not None and math.isfinite(mean)]
    sign = 1 if mode == "min" else -1
    return min(known, key=lambda i: sign * (means[i] or 0.0), default=None)


def noise(values: Sequence[Sequence[float]], at: int) -> tuple[list[int], bool]:
    """Indices of the points that do not differ from the one at `at` (stats.differ), and whether the noise is known at all.

    `values`: for each point, one per seed. The noise of a point with one seed is unknown, so it is never included.
    """
    tests = {i: stats.differ(values[at], mine) for i, mine in enumerate(values) if i != at}
    return [i for i, differs in tests.items() if differs is False], any(
        differs is not None for differs in tests.values()
    )


@dataclass(frozen=True, slots=True)
class Edge:
    """The best value of an axis is the lowest or the highest one that was tried."""

    field: str
    value: float
    side: Literal["lowest", "highest"]
    spacing: Literal["log", "linear"]
    next: float
    """The value to try next: one step further, in the axis's own spacing."""


def edge(field: str, tried: Sequence[Any], value: Any) -> Edge | None:
    """Whether `value` is the lowest or the highest of the numbers that were tried; None if not, or if there is just one.

    Numbers that span a factor of 8 or more have log spacing, such as 1e-5, 5e-5, 1e-4. Otherwise the spacing is the one with the
    more equal steps; two numbers have log spacing if they are a factor of 2 or more apart.
    """
    points = sorted({float(v) for v in tried if is_number(v)})
    if len(points) < 2 or not is_number(value) or points[0] < value < points[-1]:
        return None
    low = float(value) <= points[0]
    end, neighbour = (points[0], points[1]) if low else (points[-1], points[-2])
    spacing = _spacing(points)
    further = end * end / neighbour if spacing == "log" else 2 * end - neighbour
    if all(isinstance(v, int) for v in tried if is_number(v)):
        unit = math.gcd(*(int(v) for v in points))
        # The values are multiples of a unit: 16 comes below 32, 48 and 64, not 21.
        further = float(unit * round(further / unit) or round(further))
        if spacing == "log" and further <= 0:
            return None  # there is no whole number below 1
    else:
        further = float(f"{further:.3g}")
    return None if further == end else Edge(field, end, "lowest" if low else "highest", spacing, further)


def edge_of_range(field: str, low: float, high: float, log: bool, value: Any) -> Edge | None:
    """The same for a sampled range: whether `value` lies in its outer tenth. `next` is a quarter of the range further out."""
    if not is_number(value):
        return None
    a, b, v = (math.log(x) if log else x for x in (low, high, float(value)))
    if 0.1 <= (v - a) / (b - a) <= 0.9:
        return None
    lowest = v - a < b - v
    further = a - (b - a) / 4 if lowest else b + (b - a) / 4
    further = float(f"{math.exp(further) if log else further:.3g}")
    spacing: Literal["log", "linear"] = "log" if log else "linear"
    return Edge(field, low if lowest else high, "lowest" if lowest else "highest", spacing, further)


def is_number(value: Any) -> bool:
    """Whether it is a finite number; a bool is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _spacing(points: Sequence[float]) -> Literal["log", "linear"]:
    if points[0] <= 0:
        return "linear"
    if points[-1] / points[0] >= 8:
        return "log"
    if len(points) == 2:
        return "log" if points[1] / points[0] >= 2 else "linear"

    def variation(steps: np.ndarray) -> float:
        return float(np.std(steps) / np.mean(steps))

    return "log" if variation(np.diff(np.log(points))) <= variation(np.diff(points)) else "linear"


@dataclass(frozen=True, slots=True)
class Fit:
    """The parabola over log(x) of one group of points. `optimum` is in x; `low` and `high` are its interval at stats.LEVEL."""

    group: int
    optimum: float
    low: float
    high: float
    inside: bool
    """Whether the optimum lies among the values that were tried in that group."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why no optimum is estimated."""

    because: str


def fit(x: Sequence[float], y: Sequence[float], groups: Sequence[int], mode: Mode) -> list[Fit] | Refusal:
    """The optimum of y = a_g + b_g log(x) + c log(x)^2 in each group g, with one curvature c for all groups.

    `x` > 0, `y` and `groups` have one entry per cell. The curvature is shared because a group of three or four points alone does
    not determine its noise. A group with a single x contributes only to the noise. The interval of -b_g / 2c is Fieller's
    (J. R. Stat. Soc. B 16, 1954): exact for normal noise, and bounded only if c differs from 0 at stats.LEVEL. If it does not, or
    has the wrong sign, the result is a Refusal.
    """
    log = np.log(np.asarray(x, dtype=np.float64))
    middle, scale = float(log.mean()), float(log.std()) or 1.0
    z = (log - middle) / scale
    values = np.asarray(y, dtype=np.float64) * (1.0 if mode == "min" else -1.0)
    members: dict[int, list[int]] = {}
    for place, group in enumerate(groups):
        members.setdefault(group, []).append(place)
    lines = {group: _Lines.of(z[at], values[at]) for group, at in members.items()}
    squares = math.fsum(float(line.square @ line.square) for line in lines.values())
    if max((line.tried for line in lines.values()), default=0) < 3:
        return Refusal("fewer than three values of it were tried at each setting of the others")
    freedom = sum(len(line.rest) - min(line.tried, 2) for line in lines.values()) - 1
    if freedom < 1:
        return Refusal(f"{len(values)} results determine the parabola but not their noise: add a value, or seeds")
    # Frisch and Waugh: regress the residuals of y on those of z^2, after subtracting each group's own line from both.
    c = math.fsum(float(line.square @ line.rest) for line in lines.values()) / squares
    noise = math.fsum(float(np.sum((line.rest - c * line.square) ** 2)) for line in lines.values()) / freedom
    var_c = noise / squares
    t = stats.quantile((1 + stats.LEVEL) / 2, freedom)
    if c < -t * math.sqrt(var_c):
        return Refusal(f"the objective is not {'convex' if mode == 'min' else 'concave'} in its logarithm here")
    if c <= t * math.sqrt(var_c) or c <= 1e-12 * float(np.abs(values).max()):
        return Refusal("the curvature is within the noise: there may be no optimum")
    fits = []
    for group, line in sorted(lines.items()):
        if line.tried < 2:
            continue
        b = line.slope - c * line.square_slope
        var_b = noise / line.spread + line.square_slope**2 * var_c
        low, high = _fieller(b, c, var_b, var_c, -line.square_slope * var_c, t)
        mine = z[members[group]]
        inside = bool(mine.min() <= -b / (2 * c) <= mine.max())
        optimum, low, high = (_exp(middle + scale * v) for v in (-b / (2 * c), low, high))
        fits.append(Fit(group, optimum, low, high, inside))
    return fits


@dataclass(frozen=True, slots=True)
class _Lines:
    """For one group: the slopes of y and of z^2 over z, the residuals of both, and the sum of squares of z."""

    tried: int
    slope: float
    square_slope: float
    rest: np.ndarray
    square: np.ndarray
    spread: float

    @classmethod
    def of(cls, z: np.ndarray, y: np.ndarray) -> _Lines:
        d, square = z - z.mean(), z * z - np.mean(z * z)
        rest, spread = y - y.mean(), float(d @ d)
        tried = len(set(z.tolist()))
        if tried < 2:
            return cls(tried, 0.0, 0.0, rest, np.zeros_like(z), 0.0)
        slope, square_slope = float(d @ rest) / spread, float(d @ square) / spread
        left = square - square_slope * d if tried > 2 else np.zeros_like(z)
        return cls(tried, slope, square_slope, rest - slope * d, left, spread)


def _exp(exponent: float) -> float:
    """exp, or infinity on overflow: with a small curvature an end can be that far away."""
    return math.exp(exponent) if exponent < 700 else math.inf


def _fieller(b: float, c: float, var_b: float, var_c: float, cov: float, t: float) -> tuple[float, float]:
    """The interval of v with (b + 2 c v)^2 <= t^2 Var(b + 2 c v). Requires c^2 > t^2 Var(c)."""
    square = 4 * (c * c - t * t * var_c)
    linear = 4 * (b * c - t * t * cov)
    rest = b * b - t * t * var_b
    root = math.sqrt(max(linear * linear - 4 * square * rest, 0.0))
    return (-linear - root) / (2 * square), (-linear + root) / (2 * square)
