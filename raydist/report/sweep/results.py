"""A sweep's results, one row per point: parameters, objective over its seeds, cost and status.

Runs anywhere, while the sweep runs and after. Must not import torch or ray.

Ended cells are read from the sweep's own log, so that ten thousand of them are read in a second; only running cells are read from
their runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from raydist.errors import StorageError, UsageError
from raydist.report.sweep import analysis, base_values, stats
from raydist.report.sweep.conclusions import analyse
from raydist.report.sweep.figures import measure, spent
from raydist.report.sweep.time_to_loss import front, of_point
from raydist.run.lease import driven_since
from raydist.run.log import plain
from raydist.run.sweep_directory import RESULTS, CellNote, SweepDir
from raydist.run.sweep_state import CellState, fold
from raydist.spec import JobSpec
from raydist.spec import read_stored as read_job
from raydist.spec.sweep import SweepSpec, read_stored

if TYPE_CHECKING:
    import pyarrow as pa

STATUSES = ("running", "lost", "waiting", "paused", "failed", "stopped", "finished")
"""A point has the first of these that one of its cells has."""
_LOST = "its driver died; the same command resumes it"


def tell(folder: SweepDir, now: float | None = None) -> dict[str, Any]:
    """{"v", "sweep", "path", "objective", "points", "counts", "totals", "best", "pareto", "analysis"}: docs/how-to/sweeps.md.

    `best`: index in `points` of the best finished point. Plain data for strict JSON. `now`: Unix time. Raises UsageError if cells
    have finished and none has reported the objective; StorageError.
    """
    now = time.time() if now is None else now
    spec, base = read_stored(folder)
    events = folder.events()
    states = fold(events)
    rate = spec.limits.cost_per_gpu_hour
    since = driven_since(folder, now)
    unit = _unit(states.values(), rate)
    cells = [
        _cell(folder, note, states.get(note.id, CellState()), spec, unit, since, now) for note in folder.cells(events)
    ]
    _require(folder, spec, cells)
    points: dict[int, list[dict[str, Any]]] = {}
    for cell in cells:
        points.setdefault(cell["point"], []).append(cell)
    rows = [_row(number, points[number]) for number in sorted(points)]
    sign = 1 if spec.objective.better == "min" else -1
    summary = {
        "v": 1,
        "sweep": folder.name,
        "path": folder.uri,
        "objective": {"metric": spec.objective.metric, "mode": spec.objective.better},
        "points": rows,
        "counts": {status: n for status in STATUSES if (n := sum(cell["status"] == status for cell in cells))},
        "totals": {
            name: _sum([row[name] for row in rows]) for name in ("tokens", "seconds", "gpu_hours", "cost", "failures")
        },
        "best": analysis.best(
            [row["objective"] if row["status"] == "finished" else None for row in rows], spec.objective.better
        ),
        "pareto": {"unit": unit, "seconds": front(rows, "seconds", sign), "amount": front(rows, "amount", sign)},
    }
    summary["analysis"] = analyse(summary, spec, base)
    base_values.add(summary, spec, base)
    courses = [row.pop("course") for row in rows]  # already plain, and much larger than the rest
    made = dict(plain(summary))
    for row, course in zip(made["points"], courses, strict=True):
        row["course"] = course
    return made


def _cell(
    folder: SweepDir,
    note: CellNote,
    state: CellState,
    spec: SweepSpec,
    unit: str,
    since: float | None,
    now: float,
) -> dict[str, Any]:
    """One cell: its note, its figures and its cost; `unit`: see `_unit`.

    `since`: when the current driver took the sweep; None if it has no driver.
    """
    run, rate = folder.run(note.id), spec.limits.cost_per_gpu_hour
    status: str = state.status
    if status == "running" and (since is None or state.stretches[-1].start < since):
        status = "lost"  # its driver died before it recorded the end
    known = (
        state.figures
        if state.figures and status not in ("running", "lost")
        else measure(run)
        if state.stretches
        else {}
    )
    seconds, gpu_hours = spent(state, run, now)
    value = known.get(spec.objective.metric)
    price = _price(state, unit, rate) / 3600 if state.stretches else 0.0
    return {
        "point": note.point,
        "id": note.id,
        "parameters": dict(note.parameters),
        "status": status,
        "cause": _LOST if status == "lost" else state.cause,
        "value": value if value is not None and math.isfinite(value) else None,
        **{name: known.get(name) for name in ("tokens", "loss", "eval_loss", "tokens_per_second", "grad_noise_scale")},
        "seconds": seconds,
        "gpu_hours": gpu_hours,
        "cost": None if rate is None else gpu_hours * rate,
        "failures": state.failures,
        "run": run.uri,
        "lineage": state.lineage,
        "course": [
            [step, trained, of_workers * price, objective]
            for step, trained, of_workers, objective in known.get("course", {}).get(spec.objective.metric, [])
        ],
    }


def _unit(states: Iterable[CellState], rate: float | None) -> str:
    """The unit of the cost to reach a loss: cost, gpu_hours, or worker_hours if there was no GPU."""
    if not any(stretch.gpus for state in states for stretch in state.stretches):
        return "worker_hours"
    return "gpu_hours" if rate is None else "cost"


def _price(state: CellState, unit: str, rate: float | None) -> float:
    """The price of an hour of one of its workers, in that unit."""
    if unit == "worker_hours":
        return 1.0
    last = state.stretches[-1]
    return last.gpus / last.workers * (rate or 0.0 if unit == "cost" else 1.0)


def _row(number: int, cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A point: its cells in one row. The objective is over the finished cells, if any has finished, else over all."""
    status = next(s for s in STATUSES if any(cell["status"] == s for cell in cells))
    finished = [cell for cell in cells if cell["status"] == "finished"] or cells
    values = [cell["value"] for cell in finished if cell["value"] is not None]
    mean, low, high = stats.interval(values) if values else (None, None, None)
    return {
        "point": number,
        "parameters": cells[0]["parameters"],
        "seeds": len(cells),
        "status": status,
        "cause": next((cell["cause"] for cell in cells if cell["status"] == status and cell["cause"]), None),
        "objective": mean,
        "low": low,
        "high": high,
        "values": values,
        **{
            name: _mean([cell[name] for cell in finished])
            for name in ("loss", "eval_loss", "tokens_per_second", "grad_noise_scale")
        },
        **{
            name: _sum([cell[name] for cell in cells])
            for name in ("tokens", "seconds", "gpu_hours", "cost", "failures")
        },
        "cells": [cell["id"] for cell in cells],
        "runs": [cell["run"] for cell in cells],
        "lineage": [cell["lineage"] for cell in cells],
        "course": of_point([cell["course"] for cell in finished if cell["course"]]),
    }


def _require(folder: SweepDir, spec: SweepSpec, cells: Sequence[dict[str, Any]]) -> None:
    """Raises UsageError if cells have finished and none of them has reported the objective."""
    finished = [cell for cell in cells if cell["status"] == "finished"]
    if finished and all(cell["value"] is None for cell in finished):
        known = [m for m in ("eval_loss", "loss", "tokens_per_second") if any(cell[m] is not None for cell in finished)]
        raise UsageError(
            f"sweep {folder.name}: none of its {len(finished)} finished cells has reported {spec.objective.metric}",
            f"set objective.metric in {folder.uri}/sweep.yaml to a metric that they have: {', '.join(known)}"
            if known
            else f"look at one of them: raydist show {finished[0]['run']}",
        )


def best_job(folder: SweepDir, summary: dict[str, Any]) -> tuple[JobSpec, list[str]]:
    """The job of the best cell of the best point, as it was trained, under the sweep's name; and comment lines about its origin.

    Raises UsageError if none has finished, StorageError if its run is gone.
    """
    if summary["best"] is None:
        counts = ", ".join(f"{n} {status}" for status, n in summary["counts"].items())
        raise UsageError(
            f"sweep {folder.name}: no cell has finished ({counts})",
            "wait for one, or run the sweep's command again to resume it",
        )
    row = summary["points"][summary["best"]]
    sign = 1 if summary["objective"]["mode"] == "min" else -1
    which = min(range(len(row["values"])), key=lambda i: sign * row["values"][i])
    cell = row["cells"][which]
    run = folder.run(cell)
    try:
        job = read_job(run.storage)
    except FileNotFoundError:
        raise StorageError(
            f"{run.uri} does not exist: the best cell's job is unknown", "start the sweep again under another name"
        ) from None
    comments = [f"The best cell of sweep {folder.name}: {cell}.", *summary["analysis"]["words"]]
    for step in row["lineage"][which]:
        changes = ", ".join(f"{name} {before} -> {now}" for name, (before, now) in step["changes"].items())
        comments.append(f"At step {step['step']} it continued from {step['source']}'s checkpoint: {changes}.")
    return job.model_copy(update={"name": f"{folder.name}-best"[:100]}), comments


def write_parquet(folder: SweepDir, summary: dict[str, Any]) -> None:
    """Writes results.parquet: `table`. Raises StorageError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table(summary), sink)
    folder.storage.write(RESULTS, sink.getvalue().to_pybytes())


def table(summary: dict[str, Any]) -> pa.Table:
    """One row per point, one column per parameter; mixed values as JSON."""
    import pyarrow as pa

    flat = flatten(summary)
    columns = {name: [row[name] for row in flat] for name in (flat[0] if flat else ())}
    return pa.table({name: _column(values) for name, values in columns.items()})


def flatten(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Points as flat rows, all with the same columns: parameters by their fields, then the rest; lists stay lists."""
    fields = list(dict.fromkeys(name for row in summary["points"] for name in row["parameters"]))
    return [
        {
            "point": row["point"],
            **{name: row["parameters"].get(name) for name in fields},
            **{
                name: value
                for name, value in row.items()
                if name not in ("point", "parameters", "lineage", "values", "course")
            },
        }
        for row in summary["points"]
    ]


def _column(values: list[Any]) -> list[Any]:
    """Values of one type, as Parquet requires."""
    kinds = {type(v) for v in values if v is not None}
    if kinds <= {int, float} or len(kinds) <= 1:
        return [float(v) if v is not None and kinds == {int, float} else v for v in values]
    import json

    return [None if v is None else json.dumps(v) for v in values]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return math.fsum(known) / len(known) if known else None


def _sum(values: Sequence[Any]) -> Any:
    known = [v for v in values if v is not None]
    return sum(known) if known else None
