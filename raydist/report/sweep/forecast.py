"""A sweep before it runs: its cells, and their time and cost, measured or estimated.

Runs anywhere. Must not import torch or ray.

The number of cells that train at once follows from the nodes that the sweep will use (`Place`); GPU-hours and cost are given for
cells with GPUs there. Hours follow from measured tokens/s: of cells of this sweep that have already run, else of the base's own
run, if it is in the storage. They are valid for cells of the same model, precision and workers. For other cells they are estimated
as in `raydist plan`, if the GPU is known; else they are unknown. The time to start a cell is not included.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from raydist.errors import RaydistError
from raydist.report.sweep import base_values, search_forecast
from raydist.report.sweep.figures import measure
from raydist.run.directory import RunDir
from raydist.run.log import plain
from raydist.run.sweep_directory import SweepDir
from raydist.run.sweep_state import fold
from raydist.spec import JobSpec, read_stored
from raydist.spec.sweep import Cell, Sweep
from raydist.storage import Storage

RECKONED, UNKNOWN = "reckoned ", "unknown: "
"""Prefixes of a cell's `by` if its speed was not measured."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Tokens/s of jobs with the same `kind`. `where`: the cell or run it was measured in, or the GPU it is estimated for."""

    kind: str
    tokens_per_second: float
    where: str


@dataclass(frozen=True, slots=True)
class Place:
    """The nodes that the sweep will use: `where` as text, and how many of its cells train there `at_once`.

    `at_once` is None if there is no valid cell, or if not even one fits: then `problem` says why. `gpus(job)`: GPUs of each of the
    job's workers there.
    """

    where: str
    at_once: int | None
    problem: str
    gpus: Callable[[JobSpec], float]


EstimateSpeed = Callable[[JobSpec], Pace | str]
"""The estimated pace of a job, or why there is no estimate: `raydist.api.speed.SpeedEstimator`."""


def kind(job: JobSpec) -> str:
    """Equal for jobs whose tokens take the same time."""
    return json.dumps(
        [job.model.model_dump(mode="json"), job.precision.params, job.cluster.most, job.train.checkpoint_activations]
    )


def paces(storage: Storage, sweep: Sweep, cells: Iterable[Cell]) -> list[Pace]:
    """Measured paces: of the sweep's own cells, the newest last, else of its base's run. Raises StorageError."""
    found = []
    folder = SweepDir(storage.at(sweep.name))
    if folder.exists():
        states = fold(folder.events())
        for cell in search_forecast.chosen(sweep, folder) if sweep.spec.search.chooses else cells:
            speed = states[cell.id].figures.get("tokens_per_second") if cell.id in states else None
            if speed and cell.spec is not None:
                found.append(Pace(kind(cell.spec), float(speed), f"cell {cell.id}"))
    run = RunDir(storage.at(sweep.base.name))
    if not found and run.exists():
        try:
            ran, speed = read_stored(run.storage), measure(run)["tokens_per_second"]
        except (RaydistError, FileNotFoundError):
            return found  # a run of an older version, or a damaged one: then nothing is known
        if speed:
            found.append(Pace(kind(ran), float(speed), f"run {run.name}"))
    return found


def tell(
    sweep: Sweep,
    cells: Sequence[Cell],
    known: Sequence[Pace],
    estimate_speed: EstimateSpeed | None = None,
    place: Place | None = None,
) -> dict[str, Any]:
    """{"v", "sweep", "source", "base", "where", "cells", "totals", "limits", "over", "notes"}, plain data: docs/how-to/sweeps.md.

    `estimate_speed` estimates the cells that have no pace in `known`. Without a `place`, the nodes are unknown.
    """
    speeds = {pace.kind: pace for pace in known}
    rate = sweep.spec.limits.cost_per_gpu_hour
    gpus = _gpus if place is None else place.gpus
    rows = [_row(cell, speeds, rate, estimate_speed, gpus) for cell in cells]
    points = len({cell.point for cell in cells})
    at_once = sweep.spec.array.concurrent if place is None else place.at_once
    scouts: list[Cell] = []
    taken = able = rows
    if sweep.spec.search.chooses:  # the cells at the ends of the space represent the others
        scouts, points = sweep.scouts(), sweep.most()
        able = [_row(cell, speeds, rate, estimate_speed, gpus) for cell in scouts if not cell.problems]
        taken = [search_forecast.longest(able, ("tokens", "gpu_hours", "hours", "cost"))] * (
            points * sweep.spec.array.seeds
        )
    totals = {
        "cells": len(taken),
        "points": points,
        "invalid": sum(bool(row["problems"]) for row in rows),
        "at_once": at_once,
        "tokens": _all([row["tokens"] for row in taken]),
        "gpu_hours": _all([row["gpu_hours"] for row in taken]),
        "hours": _clock([row["hours"] for row in taken], at_once),
        "cost": _all([row["cost"] for row in taken]),
    }
    limits = sweep.spec.limits.model_dump()
    over = [
        f"limits.{name}: {limits[name]:g} will end the sweep before its last cell: it takes about {totals[name]:.3g}"
        for name in ("gpu_hours", "hours")
        if limits[name] is not None and totals[name] is not None and totals[name] > limits[name]
    ]
    return dict(
        plain({
            "v": 1, "sweep": sweep.name, "source": sweep.source, "base": sweep.base.name,
            "where": None if place is None else place.where, "cells": rows, "totals": totals,
            "limits": limits, "over": over, "notes": _notes(sweep, [*cells, *scouts], known, totals, able, place),
        })
    )  # fmt: skip


def _row(
    cell: Cell,
    speeds: dict[str, Pace],
    rate: float | None,
    estimate_speed: EstimateSpeed | None,
    gpus: Callable[[JobSpec], float],
) -> dict[str, Any]:
    job = cell.spec
    row: dict[str, Any] = {
        "index": cell.index,
        "id": cell.id,
        "point": cell.point,
        "parameters": dict(cell.parameters),
        "seed": cell.seed,
    }
    keys = ("workers", "steps", "tokens", "hours", "gpu_hours", "cost", "by")
    row |= dict.fromkeys(keys)
    if job is not None:
        hours = by = None
        each = gpus(job)
        gpu_hours = None if each else 0.0
        pace = speeds.get(kind(job)) if speeds else None
        if pace is not None:
            by = f"measured in {pace.where}"
        elif estimate_speed is not None:
            estimate = estimate_speed(job)
            by = f"{UNKNOWN}{estimate}" if isinstance(estimate, str) else f"{RECKONED}for {estimate.where}"
            pace = None if isinstance(estimate, str) else estimate
        if pace is not None and cell.tokens is not None:
            hours = cell.tokens / pace.tokens_per_second / 3600
            gpu_hours = hours * job.cluster.most * each
        cost = gpu_hours * rate if gpu_hours is not None and rate is not None else None
        values = (job.cluster.most, job.train.steps, cell.tokens, hours, gpu_hours, cost, by)
        row |= dict(zip(keys, values, strict=True))
    return {**row, "adjusted": dict(cell.adjusted), "notes": list(cell.notes), "problems": list(cell.problems)}


def _gpus(job: JobSpec) -> float:
    """GPUs of each worker if the nodes are unknown: one, unless the job sets it."""
    each = job.cluster.gpus_per_worker
    return 1.0 if isinstance(each, str) else each


def _clock(hours: Sequence[float | None], at_once: int | None) -> float | None:
    """Wall-clock hours if cells start in order, as soon as one of `at_once` places is free."""
    if at_once is None or not hours or any(h is None for h in hours):
        return None
    free = [0.0] * at_once
    for h in hours:
        heapq.heappush(free, heapq.heappop(free) + (h or 0.0))
    return max(free)


def _notes(
    sweep: Sweep,
    cells: Sequence[Cell],
    known: Sequence[Pace],
    totals: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    place: Place | None,
) -> list[str]:
    """`rows`: the cells that the hours are computed from."""
    notes = []
    by = [row["by"] or "" for row in rows]
    estimated = [one.removeprefix(RECKONED) for one in by if one.startswith(RECKONED)]
    if sweep.spec.search.chooses:
        notes += search_forecast.notes(sweep, cells)
    notes += base_values.outside(sweep.axes, sweep.base)
    draws = (sweep.spec.array.samples or 0) * sweep.spec.array.seeds
    if sweep.spec.array.type == "random" and not sweep.spec.search.chooses and totals["cells"] < draws:
        notes.append(f"{draws - totals['cells']} draws repeat others, and are left out")
    if known:
        of = known[-1] if known[-1].where.startswith("run") else known[0]
        more = f" and {len(known) - 1} more cells" if len(known) > 1 else ""
        notes.append(f"time: by {of.tokens_per_second:,.0f} tokens/s of {of.where}{more}, without the start of a cell")
    if estimated:
        some = len(estimated) < len(rows) and not sweep.spec.search.chooses
        of_them = f" marked ~, of {len(estimated)} of {len(rows)} cells" if some else ""
        notes.append(
            f"time{of_them}: estimated as in raydist plan, {estimated[0]}, not measured, without the start of a cell"
        )
    if known or estimated:
        if (
            place is None
            and totals["gpu_hours"] is not None
            and any(c.spec is not None and c.spec.cluster.gpus_per_worker == "auto" for c in cells)
        ):
            notes.append("GPU-hours: one GPU per worker, because cluster.gpus_per_worker is auto")
    elif cells:
        notes.append(
            f"time: unknown until a cell or the base, {sweep.base.name}, has run in the same storage; then from its tokens/s"
        )
    why = dict.fromkeys(one.removeprefix(UNKNOWN) for one in by if one.startswith(UNKNOWN))
    notes += [f"time is not estimated: {one}" for one in why]
    return [*notes, *_room(sweep, totals["at_once"], place)]


def _room(sweep: Sweep, at_once: int | None, place: Place | None) -> list[str]:
    """How many cells train at once, and where."""
    if place is not None and place.problem:
        return [f"it cannot run on {place.where}: {place.problem}; choose another cluster with --address"]
    if not at_once:
        return []
    many = "one cell after another" if at_once == 1 else f"{at_once} cells at once"
    concurrent = sweep.spec.array.concurrent
    if place is None:
        return [many]
    limited = concurrent is not None and concurrent > at_once
    why = f"; array.concurrent is {concurrent}, but there is no room for more" if limited else ""
    return [f"on {place.where}: {many}{why}"]


def _all(values: Sequence[Any]) -> Any:
    """The sum, if all of them are known."""
    if not values or any(v is None for v in values):
        return None
    return math.fsum(values) if any(isinstance(v, float) for v in values) else sum(values)
