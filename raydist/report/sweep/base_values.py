"""The base job's own values beside those that a sweep tries: is the base one of its points, and does the sweep reach to it?

Runs anywhere. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from raydist.report.sweep.conclusions import measured, named, value
from raydist.spec.models import JobSpec
from raydist.spec.sweep.models import SweepSpec
from raydist.spec.sweep.names import shortest
from raydist.spec.sweep.space import Axis, axes


def add(told: dict[str, Any], spec: SweepSpec, base: JobSpec) -> None:
    """Adds to the analysis of `results.tell` where the base stands (`base`: place of its point, or None), the fields whose best
    value lies `inside` of what was tried, and both in words, after the sentence on the best point.
    """
    analysis = told["analysis"]
    analysis |= {"base": None, "inside": []}
    found, _ = axes(spec)
    mine = own(base, [axis.field for axis in found])
    at = analysis["base"] = place(told["points"], mine)
    if told["best"] is None:
        return
    said = [beside_the_best(told, at)] if at is not None else outside(found, base)
    best = told["points"][told["best"]]["parameters"]
    if spec.scheduler.name != "pbt":  # there a cell's values change as it trains
        edges = {edge["field"] for edge in analysis["edges"]}
        inner = [axis for axis in found if axis.field not in edges and _inside(axis, best.get(axis.field))]
        analysis["inside"] = [axis.field for axis in inner]
        if inner:
            each = [f"{shortest(axis.field)} {value(best[axis.field])} ({_span(axis)})" for axis in inner]
            said.append(f"inside of what was tried: {', '.join(each)}")
    analysis["words"][1:1] = [line for line in said if line]


def marks(told: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    """What the point is beside its status: `best`, `base`, both or neither."""
    places = {"best": told["best"], "base": told["analysis"]["base"]}
    return [name for name, at in places.items() if at is not None and told["points"][at]["point"] == row["point"]]


def _inside(axis: Axis, best: Any) -> bool:
    limits = reach(axis)
    return limits is not None and _number(best) and limits[0] < best < limits[1]


def _span(axis: Axis) -> str:
    low, high = reach(axis) or (math.nan, math.nan)
    return f"{value(low)} to {value(high)}"


def own(base: JobSpec, fields: Sequence[str]) -> dict[str, Any]:
    """Field -> the base's value; without those that it has not."""
    tree = base.model_dump(mode="json")
    found = {}
    for name in fields:
        node: Any = tree
        for part in name.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        if node is not None:
            found[name] = node
    return found


def place(rows: Sequence[Mapping[str, Any]], mine: Mapping[str, Any]) -> int | None:
    """Place of the point that has the base's values; None where there is none."""
    return next((i for i, row in enumerate(rows) if dict(row["parameters"]) == dict(mine)), None)


def reach(axis: Axis) -> tuple[float, float] | None:
    """The least and the most number that an axis tries; None where it is not of numbers."""
    if axis.kind != "values":
        return axis.low, axis.high
    numbers = [float(v) for v in axis.values if _number(v)]
    return (min(numbers), max(numbers)) if numbers and len(numbers) == len(axis.values) else None


def outside(tried: Sequence[Axis], base: JobSpec) -> list[str]:
    """A sentence for each axis that does not reach to the base's own value."""
    mine, said = own(base, [axis.field for axis in tried]), []
    for axis in tried:
        limits, here = reach(axis), mine.get(axis.field, math.nan)
        if axis.fixed or limits is None or not _number(here) or limits[0] <= here <= limits[1]:
            continue
        said.append(
            f"{shortest(axis.field)} {value(here)} of the base lies outside of what is tried ({value(limits[0])} to "
            f"{value(limits[1])}): the best may be worse than the base"
        )
    return said


def beside_the_best(told: Mapping[str, Any], at: int | None) -> str:
    """What the sweep has gained over the point at `at`, which has the base's values."""
    if at is None or told["points"][at]["status"] != "finished" or told["points"][at]["objective"] is None:
        return ""
    row, best = told["points"][at], told["points"][told["best"]]
    its = f"the base's own values ({named(row['parameters'])})"
    if at == told["best"]:
        return f"{its} are the best"
    gain = abs(row["objective"] - best["objective"])
    noise = ", within the noise" if at in told["analysis"]["as_good"] else ""
    side = "lower" if told["objective"]["mode"] == "min" else "higher"
    return (
        f"{its}: {told['objective']['metric']} {measured(row['objective'])}; the best is {measured(gain)} {side}{noise}"
    )


def _number(v: Any) -> bool:
    return isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)
