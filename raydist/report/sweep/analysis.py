"""What the results of a sweep say: which points are as good as the best, whether it lies on the edge, where the optimum is.

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
    """Place of the best mean; the first of equal ones; None where there is none."""
    known = [i for i, mean in enumerate(means) if mean is not None and math.isfinite(mean)]
    sign = 1 if mode == "min" else -1
    return min(known, key=lambda i: sign * (means[i] or 0.0), default=None)


def noise(values: Sequence[Sequence[float]], at: int) -> tuple[list[int], bool]:
    """Places of the points that do not differ from the one at `at` (stats.differ), and whether the noise is known at all.

    `values` are each point's, one a seed. A point with one seed says nothing of its noise, and is not among them.
    """
    told = {i: stats.differ(values[at], mine) for i, mine in enumerate(values) if i != at}
    return [i for i, differs in told.items() if differs is False], any(differs is not None for differs in told.values())


@dataclass(frozen=True, slots=True)
class Edge:
    """The best value of an axis is the last one that was tried on that side."""

    field: str
    value: float
    side: Literal["lowest", "highest"]
    spacing: Literal["log", "linear"]
    next: float
    """What to try: one step further on the axis's own spacing."""


def edge(field: str, tried: Sequence[Any], value: Any) -> Edge | None:
    """Whether `value` is the lowest or the highest of the numbers that were tried; None if not, or if there is just one.

    Numbers that span a factor of 8 are spaced in logarithm, as 1e-5, 5e-5, 1e-4 are meant; else it is the spacing in which steps
    are more alike, and of two numbers log if they are a factor of 2 apart.
    """
    points = sorted({float(v) for v in tried if _number(v)})
    if len(points) < 2 or not _number(value) or points[0] < value < points[-1]:
        return None
    low = float(value) <= points[0]
    end, neighbour = (points[0], points[1]) if low else (points[-1], points[-2])
    spacing = _spacing(points)
    further = end * end / neighbour if spacing == "log" else 2 * end - neighbour
    if all(isinstance(v, int) for v in tried if _number(v)):
        unit = math.gcd(*(int(v) for v in points))
        # 16 below 32, 48 and 64, not 21: what is tried are multiples.
        further = float(unit * round(further / unit) or round(further))
        if spacing == "log" and further <= 0:
            return None  # there is no whole number below 1
    else:
        further = float(f"{further:.3g}")
    return None if further == end else Edge(field, end, "lowest" if low else "highest", spacing, further)


def edge_of_range(field: str, low: float, high: float, log: bool, value: Any) -> Edge | None:
    """The same for a range that was drawn from: whether `value` lies in its outer tenth. `next` is a quarter of it further out."""
    if not _number(value):
        return None
    a, b, v = (math.log(x) if log else x for x in (low, high, float(value)))
    if 0.1 <= (v - a) / (b - a) <= 0.9:
        return None
    lowest = v - a < b - v
    further = a - (b - a) / 4 if lowest else b + (b - a) / 4
    further = float(f"{math.exp(further) if log else further:.3g}")
    spacing: Literal["log", "linear"] = "log" if log else "linear"
    return Edge(field, low if lowest else high, "lowest" if lowest else "highest", spacing, further)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _spacing(points: Sequence[float]) -> Literal["log", "linear"]:
    if points[0] <= 0:
        return "linear"
    if points[-1] / points[0] >= 8:
        return "log"
    if len(points) == 2:
        return "log" if points[1] / points[0] >= 2 else "linear"

    def unlike(steps: np.ndarray) -> float:
        return float(np.std(steps) / np.mean(steps))

    return "log" if unlike(np.diff(np.log(points))) <= unlike(np.diff(points)) else "linear"


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
    """Why no optimum is told."""

    because: str


def fit(x: Sequence[float], y: Sequence[float], groups: Sequence[int], mode: Mode) -> list[Fit] | Refusal:
    """The optimum of y = a_g + b_g log(x) + c log(x)^2 in each group g: curvature in common, place and height of its own.

    `x` > 0, `y` and `groups` are of the observations, one a cell. In common, because a group of three or four points alone leaves
    nothing to judge its noise by. A group in which one x was tried tells of the noise only. The interval of -b_g / 2c is Fieller's
    (J. R. Stat. Soc. B 16, 1954): exact for normal noise, and bounded just where c differs from 0 at stats.LEVEL. Where it does
    not, or bends the wrong way, the optimum is refused.
    """
    log = np.log(np.asarray(x, dtype=np.float64))
    middle, scale = float(log.mean()), float(log.std()) or 1.0
    z = (log - middle) / scale
    values = np.asarray(y, dtype=np.float64) * (1.0 if mode == "min" else -1.0)
    members: dict[int, list[int]] = {}
    for place, group in enumerate(groups):
        members.setdefault(group, []).append(place)
    lines = {group: _Lines.of(z[at], values[at]) for group, at in members.items()}
    bend = math.fsum(float(line.square @ line.square) for line in lines.values())
    if max((line.tried for line in lines.values()), default=0) < 3:
        return Refusal("fewer than three values of it were tried at any one setting of the others")
    freedom = sum(len(line.rest) - min(line.tried, 2) for line in lines.values()) - 1
    if freedom < 1:
        return Refusal(
            f"{len(values)} results fix the parabola and leave nothing to judge their noise by: add a value, or seeds"
        )
    # Frisch and Waugh: what is left of y over what is left of z^2, once each group's own line is taken out of both.
    c = math.fsum(float(line.square @ line.rest) for line in lines.values()) / bend
    noise = math.fsum(float(np.sum((line.rest - c * line.square) ** 2)) for line in lines.values()) / freedom
    var_c = noise / bend
    t = stats.quantile((1 + stats.LEVEL) / 2, freedom)
    if c < -t * math.sqrt(var_c):
        return Refusal("the results bend the wrong way")
    if c <= t * math.sqrt(var_c) or c <= 1e-12 * float(np.abs(values).max()):
        return Refusal("the results do not bend: within their noise there may be no optimum")
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
    """In one group: the slopes of y and of z^2 over z, what is left of both beside their lines, and the sum of squares of z."""

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
    """Where a slight bend puts an end beyond all numbers: infinity, or 0."""
    return math.exp(exponent) if exponent < 700 else math.inf


def _fieller(b: float, c: float, var_b: float, var_c: float, cov: float, t: float) -> tuple[float, float]:
    """Where (b + 2 c v)^2 <= t^2 Var(b + 2 c v); c^2 > t^2 Var(c)."""
    square = 4 * (c * c - t * t * var_c)
    linear = 4 * (b * c - t * t * cov)
    rest = b * b - t * t * var_b
    root = math.sqrt(max(linear * linear - 4 * square * rest, 0.0))
    return (-linear - root) / (2 * square), (-linear + root) / (2 * square)
