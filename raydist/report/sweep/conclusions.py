"""Conclusions from a sweep's results: figures by name, and the same in sentences.

Runs anywhere. Pure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from raydist.records import batch_far_beyond_noise
from raydist.report import text
from raydist.report.sweep import analysis
from raydist.report.sweep.analysis import Edge, Refusal
from raydist.report.sweep.time_to_loss import reached
from raydist.spec.load import merge, nest
from raydist.spec.models import JobSpec
from raydist.spec.sweep.equal import adjusted
from raydist.spec.sweep.models import SweepSpec
from raydist.spec.sweep.names import shortest
from raydist.spec.sweep.space import Axis, axes

RATE, BATCH, CONTEXT, MEASURED = "optim.lr", "train.global_batch", "model.context", "observe.grad_noise"
_SHOWN = 5
UNITS = {"cost": "cost", "gpu_hours": "GPU-hours", "worker_hours": "worker-hours"}
"""Units of the cost to reach a loss."""


def analyse(summary: Mapping[str, Any], spec: SweepSpec, base: JobSpec) -> dict[str, Any]:
    """{"as_good", "noise_known", "reached", "edges", "optima", "optima_refused", "words"} from the points of `results.tell`.

    as_good: indices of the points within the noise of the best; reached: the points that were first to reach a loss that is as
    good, or nearly; optima: of the learning rate, for each setting of the other parameters.
    """
    places = [
        i for i, row in enumerate(summary["points"]) if row["status"] == "finished" and row["objective"] is not None
    ]
    finished = [summary["points"][i] for i in places]
    if summary["best"] is None:
        words = ["no cell has finished yet"]
        return {
            "as_good": [],
            "noise_known": False,
            "reached": None,
            "edges": [],
            "optima": [],
            "optima_refused": None,
            "words": words,
        }
    best = summary["points"][summary["best"]]
    near, known = analysis.noise([row["values"] for row in finished], places.index(summary["best"]))
    as_good = [places[i] for i in near]
    found, _ = axes(spec)
    # Under pbt the values of a cell change while it trains, so its initial values have no edge and no optimum.
    mixed = spec.scheduler.copies
    edges = [] if mixed else _edges(finished, best, found, base, spec)
    fits = (
        Refusal("under pbt it changes while a cell trains")
        if mixed
        else _optima(finished, summary["objective"]["mode"])
    )
    first = _reached(summary, finished, best, [summary["points"][i] for i in as_good])
    words = [
        _best(best, summary["objective"]["metric"]),
        _noise([summary["points"][i] for i in as_good], known, len(finished)),
        *_first(summary, first, best),
    ]
    words += [_edge(one) for one in edges]
    words.append(_critical(best, base))
    if isinstance(fits, Refusal):
        words.append(f"no optimum of {shortest(RATE)} estimated: {fits.because}")
    else:
        words += [_optimum(one) for one in fits]
    return {
        "as_good": as_good,
        "noise_known": known,
        "reached": first,
        "edges": [dataclasses.asdict(one) for one in edges],
        "optima": [] if isinstance(fits, Refusal) else fits,
        "optima_refused": fits.because if isinstance(fits, Refusal) else None,
        "words": [line for line in words if line],
    }


def named(parameters: Mapping[str, Any]) -> str:
    """`learning_rate 0.0001, batch_size 64`."""
    return ", ".join(f"{shortest(name)} {value(v)}" for name, v in parameters.items())


def ranked(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The points of `results.tell`, the best first: those that have not finished, or have no objective, come last."""
    sign = 1 if summary["objective"]["mode"] == "min" else -1
    return sorted(
        summary["points"],
        key=lambda row: (row["status"] != "finished", row["objective"] is None, sign * (row["objective"] or 0.0)),
    )


def value(v: Any) -> str:
    """A parameter's value as text."""
    return f"{v:g}" if isinstance(v, float) else str(v)


def _edges(
    finished: Sequence[Mapping[str, Any]],
    best: Mapping[str, Any],
    found: Sequence[Axis],
    base: JobSpec,
    spec: SweepSpec,
) -> list[Edge]:
    edges = []
    for axis in found:
        mine = best["parameters"].get(axis.field)
        if axis.kind == "values":
            one = analysis.edge(axis.field, [row["parameters"].get(axis.field) for row in finished], mine)
        else:
            one = analysis.edge_of_range(axis.field, axis.low, axis.high, axis.kind == "log_uniform", mine)
            if one is not None and axis.kind == "int_uniform":
                one = dataclasses.replace(one, next=float(round(one.next)))
        if one is not None and _possible(base, axis.field, one.next, spec):
            edges.append(one)
    return edges


def _possible(base: JobSpec, field: str, tried: float, spec: SweepSpec) -> bool:
    """Whether a job can have that value at all: dropout, for example, ends at 0."""
    new = int(tried) if tried.is_integer() else tried
    tree = base.model_dump(mode="json")
    fitted, _ = adjusted(base, {field: new}, spec.equal)
    for name, v in {field: new, **fitted}.items():
        tree = merge(tree, nest(name, v))
    try:
        JobSpec.model_validate(tree)
    except ValidationError:
        return False
    return True


def _optima(finished: Sequence[Mapping[str, Any]], mode: analysis.Mode) -> list[dict[str, Any]] | Refusal:
    """The best learning rate at each setting of the other parameters."""
    x, y, groups = [], [], []
    settings: dict[str, tuple[int, dict[str, Any]]] = {}
    for row in finished:
        rate = row["parameters"].get(RATE)
        others = {name: v for name, v in row["parameters"].items() if name != RATE}
        if not isinstance(rate, int | float):
            return Refusal("it was not varied")
        group, _ = settings.setdefault(repr(others), (len(settings), others))
        for one in row["values"]:
            x.append(float(rate))
            y.append(float(one))
            groups.append(group)
    fits = analysis.fit(x, y, groups, mode)
    if isinstance(fits, Refusal):
        return fits
    at = dict(settings.values())
    return [{"at": at[one.group], **{k: v for k, v in dataclasses.asdict(one).items() if k != "group"}} for one in fits]


def _best(row: Mapping[str, Any], metric: str) -> str:
    spread = (
        f"95% interval {measured(row['low'])} to {measured(row['high'])} over {row['seeds']} seeds"
        if row["low"] is not None
        else "one seed"
    )
    return f"best: {named(row['parameters'])}: {metric} {measured(row['objective'])} ({spread})"


def _noise(rows: Sequence[Mapping[str, Any]], known: bool, count: int) -> str:
    if count < 2:
        return ""
    if not known:
        return "one seed per point, so the noise is unknown; array.seeds: 3 would measure it"
    if not rows:
        return "no other point is within the noise of the best"
    more = f"; and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return f"within the noise of the best: {'; '.join(named(row['parameters']) for row in rows[:_SHOWN])}{more}"


def _reached(
    summary: Mapping[str, Any],
    finished: Sequence[Mapping[str, Any]],
    best: Mapping[str, Any],
    as_good: Sequence[Mapping[str, Any]],
) -> dict[str, Any] | None:
    """{"objective", "of", "quickest", "cheapest", "best"}: the points that reached an objective first, and when the best did.

    The objective is the worst within the noise of the best (`of`: as_good), else the second best (`of`: second). None for one
    point.
    """
    sign = 1 if summary["objective"]["mode"] == "min" else -1
    others = as_good or [row for row in finished if row is not best]
    if not others:
        return None
    pick = max if as_good else min
    target = pick((row["objective"] for row in others), key=lambda v: sign * v)
    arrivals = [one for row in summary["points"] if (one := reached(row, target, sign)) is not None]
    own = next((one for one in arrivals if one["point"] == best["point"]), None)
    if own is None:
        return None
    return {
        "objective": target,
        "of": "as_good" if as_good else "second",
        "quickest": min(arrivals, key=lambda one: one["seconds"]),
        "cheapest": min(arrivals, key=lambda one: one["amount"]),
        "best": own,
    }


def _first(summary: Mapping[str, Any], first: Mapping[str, Any] | None, best: Mapping[str, Any]) -> list[str]:
    """`first` in sentences: one sentence if the quickest is also the cheapest."""
    if first is None:
        return []
    names = {row["point"]: named(row["parameters"]) for row in summary["points"]}
    whose = "as good as the best, within the noise" if first["of"] == "as_good" else "the second best"
    target = f"{summary['objective']['metric']} {measured(first['objective'])} ({whose})"
    unit = str(summary["pareto"]["unit"])

    def line(how: str, one: Mapping[str, Any], *axes: str) -> str:
        took = ", ".join(_took(one, axis, unit) for axis in axes)
        many = "" if one["seconds_range"] is None else ", mean of its seeds"
        if one["point"] == best["point"]:
            return f"{how} to {target}: the best itself {took}{many}"
        longer = first["best"][axes[0]] / one[axes[0]] if one[axes[0]] else math.inf
        beside = ", ".join(_took(first["best"], axis, unit) for axis in axes)
        than = "long" if axes[0] == "seconds" else "much"
        return f"{how} to {target}: {names[one['point']]} {took}{many}; the best {beside}: {longer:.3g} times as {than}"

    if first["quickest"]["point"] == first["cheapest"]["point"]:
        return [line("quickest and cheapest", first["quickest"], "seconds", "amount")]
    return [line("quickest", first["quickest"], "seconds"), line("cheapest", first["cheapest"], "amount")]


def _took(one: Mapping[str, Any], axis: str, unit: str) -> str:
    """The time or cost: `in 38 s`, `for 0.02 GPU-hours`, `at cost 1.2`."""
    if axis == "seconds":
        return f"in {text.span(one[axis])}" if not 10 <= one[axis] < 60 else f"in {one[axis]:.0f} s"
    return f"at cost {one[axis]:.3g}" if unit == "cost" else f"for {one[axis]:.3g} {UNITS[unit]}"


def _critical(best: Mapping[str, Any], base: JobSpec) -> str:
    """Compares the best point's batch with its gradient noise scale, both in sequences."""
    scale = best["grad_noise_scale"]
    if scale is None:
        return ""
    fields = (BATCH, base.train.global_batch), (CONTEXT, base.model.context), (MEASURED, base.observe.grad_noise)
    batch, context, every = (best["parameters"].get(name, value) for name, value in fields)
    measured = best["tokens"] // (best["seeds"] * batch * context * every) if every else 0
    shown = (
        f"{scale:.3g} sequences" if scale >= 1 else "less than 1 sequence"
    )  # no batch is smaller; the estimate may be 0
    line = f"gradient noise scale of the best: {shown}, its global batch has {batch}"
    beyond = batch_far_beyond_noise(batch, scale, measured)
    return (
        f"{line}: far beyond it, most of the batch adds no information (docs/explanation/noise.md)" if beyond else line
    )


def _edge(one: Edge) -> str:
    return f"{shortest(one.field)} {value(one.value)} is the {one.side} value that was tried: try {value(one.next)} too"


def _optimum(one: Mapping[str, Any]) -> str:
    place = f" at {named(one['at'])}" if one["at"] else ""
    outside = "" if one["inside"] else "; outside the tried range"
    return f"optimum of {shortest(RATE)}{place}: {one['optimum']:.2g} (95% interval {one['low']:.2g} to {one['high']:.2g}{outside})"


def measured(number: float | None) -> str:
    """A value of the objective as text: a loss in nats, or tokens per second."""
    return f"{number:,.0f}" if number is not None and abs(number) >= 1000 else text.loss(number)
