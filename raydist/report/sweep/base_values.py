"""Compares the base job's own values with those that a sweep tries: whether the base is a point, and within the tried ranges.

Runs anywhere. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from raydist.report.sweep.analysis import is_number
from raydist.report.sweep.conclusions import measured, named, value
from raydist.spec.models import JobSpec
from raydist.spec.sweep.models import SweepSpec
from raydist.spec.sweep.names import shortest
from raydist.spec.sweep.space import Axis, axes


def add(summary: dict[str, Any], spec: SweepSpec, base: JobSpec) -> None:
    """Adds to the analysis of `results.tell`: `base` (index of the base's point, or None), `inside` (the fields whose best value
    lies inside the tried range), and sentences about both, after the sentence about the best point.
    """
    analysis = summary["analysis"]
    analysis |= {"base": None, "inside": []}
    found, _ = axes(spec)
    mine = own(base, [axis.field for axis in found])
    at = analysis["base"] = place(summary["points"], mine)
    if summary["best"] is None:
        return
    lines = [beside_the_best(summary, at)] if at is not None else outside(found, base)
    best = summary["points"][summary["best"]]["parameters"]
    if not spec.scheduler.copies:  # under pbt, a cell's values change while it trains
        edges = {edge["field"] for edge in analysis["edges"]}
        inner = [axis for axis in found if axis.field not in edges and _inside(axis, best.get(axis.field))]
        analysis["inside"] = [axis.field for axis in inner]
        if inner:
            each = [f"{shortest(axis.field)} {value(best[axis.field])} ({_span(axis)})" for axis in inner]
            lines.append(f"inside the tried range: {', '.join(each)}")
    analysis["words"][1:1] = [line for line in lines if line]


def marks(summary: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    """Labels of a point, besides its status: `best`, `base`, both or neither."""
    places = {"best": summary["best"], "base": summary["analysis"]["base"]}
    return [name for name, at in places.items() if at is not None and summary["points"][at]["point"] == row["point"]]


def _inside(axis: Axis, best: Any) -> bool:
    limits = reach(axis)
    return limits is not None and is_number(best) and limits[0] < best < limits[1]


def _span(axis: Axis) -> str:
    low, high = reach(axis) or (math.nan, math.nan)
    return f"{value(low)} to {value(high)}"


def own(base: JobSpec, fields: Sequence[str]) -> dict[str, Any]:
    """Field -> the base's value, for the fields that it has."""
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
    """Index of the point that has the base's values; None if there is none."""
    return next((i for i, row in enumerate(rows) if dict(row["parameters"]) == dict(mine)), None)


def reach(axis: Axis) -> tuple[float, float] | None:
    """The lowest and the highest number that an axis tries; None if its values are not numbers."""
    if axis.kind != "values":
        return axis.low, axis.high
    numbers = [float(v) for v in axis.values if is_number(v)]
    return (min(numbers), max(numbers)) if numbers and len(numbers) == len(axis.values) else None


def outside(tried: Sequence[Axis], base: JobSpec) -> list[str]:
    """A sentence for each axis whose range does not contain the base's own value."""
    mine, lines = own(base, [axis.field for axis in tried]), []
    for axis in tried:
        limits, here = reach(axis), mine.get(axis.field, math.nan)
        if axis.fixed or limits is None or not is_number(here) or limits[0] <= here <= limits[1]:
            continue
        lines.append(
            f"{shortest(axis.field)} {value(here)} of the base lies outside the tried range ({value(limits[0])} to "
            f"{value(limits[1])}): the best may be worse than the base"
        )
    return lines


def beside_the_best(summary: Mapping[str, Any], at: int | None) -> str:
    """A sentence that compares the best point with the point at `at`, which has the base's values."""
    if at is None or summary["points"][at]["status"] != "finished" or summary["points"][at]["objective"] is None:
        return ""
    row, best = summary["points"][at], summary["points"][summary["best"]]
    its = f"the base's own values ({named(row['parameters'])})"
    if at == summary["best"]:
        return f"{its} are the best"
    gain = abs(row["objective"] - best["objective"])
    noise = ", within the noise" if at in summary["analysis"]["as_good"] else ""
    side = "lower" if summary["objective"]["mode"] == "min" else "higher"
    return f"{its}: {summary['objective']['metric']} {measured(row['objective'])}; the best is {measured(gain)} {side}{noise}"
