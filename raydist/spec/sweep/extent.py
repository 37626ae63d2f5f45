"""How far the space of a search reaches: how many points it has, and those at its ends.

Runs anywhere. Pure. A search chooses its cells as results come, so what has to be known before anything starts (is it a job, do its
workers fit, how many tokens) is asked of the ends, for those between them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from raydist.spec.sweep.space import Axis, Point

_TOGETHER = ("cluster.", "parallel.", "data.", "offload.", "model.name")
"""What a cluster is checked for: every value of these with every other."""
_MOST = 64
"""Such combinations that are looked at; where there are more, each value is seen once."""


def size(axes: Sequence[Axis]) -> int | None:
    """Points that there are; None if an axis is a range of numbers that are not whole."""
    counts = [_count(axis) for axis in axes]
    return None if None in counts else math.prod(n for n in counts if n is not None)


def holds(axes: Sequence[Axis], point: Point) -> bool:
    """Whether it is a point of this space: a file that was changed may have had another one."""
    return point.keys() == {axis.field for axis in axes} and all(_on(axis, point[axis.field]) for axis in axes)


def _on(axis: Axis, value: Any) -> bool:
    if axis.kind == "values":
        return value in axis.values
    return isinstance(value, int | float) and axis.low <= value <= axis.high


def _count(axis: Axis) -> int | None:
    if axis.kind == "values":
        return len(axis.values)
    return int(axis.high) - int(axis.low) + 1 if axis.kind == "int_uniform" else None


def ordered(axis: Axis) -> list[Any] | None:
    """The values of a list of numbers, ascending; None for other lists, and for ranges."""
    if axis.kind != "values" or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in axis.values):
        return None
    return sorted(axis.values)


def extremes(axes: Sequence[Axis]) -> list[Point]:
    """The lowest of everything, the highest of everything, and between them each end of each axis once; of those by which a cluster
    is checked every combination. Lists that are not numbers have their first value and their last as ends, and all are seen.
    """
    ends = {axis.field: _ends(axis) for axis in axes}
    lowest = {field: values[0] for field, values in ends.items()}
    found = [lowest, {field: values[-1] for field, values in ends.items()}]
    found += [{**lowest, field: value} for field, values in ends.items() for value in values[1:]]
    together = [field for field in ends if field.startswith(_TOGETHER)]
    if math.prod(len(ends[field]) for field in together) <= _MOST:
        rows = itertools.product(*(ends[field] for field in together))
        found += [{**lowest, **dict(zip(together, row, strict=True))} for row in rows]
    return [point for i, point in enumerate(found) if point not in found[:i]]


def _ends(axis: Axis) -> list[Any]:
    if axis.kind != "values":
        return [axis.tidy(axis.low), axis.tidy(axis.high)]
    numbers = ordered(axis)
    if numbers is None:
        return list(axis.values)
    return numbers if axis.field.startswith(_TOGETHER) else list(dict.fromkeys((numbers[0], numbers[-1])))
