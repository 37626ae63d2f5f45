"""The time and cost at which cells reached each value of the objective: their courses, the Pareto front, and the first of them.

Runs anywhere. Pure.

Seconds are those of the training steps of all attempts: steps that were trained again after a restart count each time; start-up,
evaluations, checkpoints and waiting do not count. So cells are compared by their training, and not by what the first one loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raydist.records import Event
from raydist.report.summary import evals
from raydist.run.log import Segment, merge

PARTS = 10
"""The training loss is given as means over this many equal parts of the steps, because the loss of a single step is noisy."""
Axis = Literal["seconds", "amount"]


def course(segments: Sequence[Segment], events: Sequence[Event]) -> dict[str, list[list[float]]]:
    """From a run's records: metric -> [step, seconds, worker-seconds, value] of each evaluation, ascending by step.

    `eval_loss`: every valid one, see `evals`; `loss`: PARTS means, weighted by tokens. Values that are not finite are left out.
    """
    rows = merge(list(segments))
    if not rows.num_rows:
        return {"eval_loss": [], "loss": []}
    step, attempt = (rows[name].to_numpy() for name in ("step", "attempt"))
    every = pa.concat_tables([segment.rows for segment in segments])
    # Ascending by attempt, then by step, as written: the rows before a row were trained before it.
    place = np.searchsorted(_order(every["attempt"].to_numpy(), every["step"].to_numpy()), _order(attempt, step))
    each = every["seconds"].to_numpy()
    seconds = np.cumsum(each)[place]
    of_workers = np.cumsum(each * every["world_size"].to_numpy())[place]

    def entry(at: int, value: float) -> list[float]:
        return [int(step[at]), round(float(seconds[at]), 3), round(float(of_workers[at]), 3), value]

    held_out = [(int(np.searchsorted(step, s)), loss) for s, loss in evals(events).items() if s <= step[-1]]
    return {
        "eval_loss": [entry(at, loss) for at, loss in held_out if math.isfinite(loss)],
        "loss": [entry(at, loss) for at, loss in _means(rows)],
    }


def _order(attempt: NDArray[np.int64], step: NDArray[np.int64]) -> NDArray[np.int64]:
    return attempt * np.int64(2**40) + step


def _means(rows: pa.Table) -> Iterator[tuple[int, float]]:
    """(index of its last step, mean loss) of each part; the last mean is the `loss` of `raydist.report.sweep.figures`."""
    count = rows.num_rows
    width = max(1, round(count / PARTS))
    loss, tokens = (np.asarray(rows[name], dtype=np.float64) for name in ("loss", "tokens"))
    for end in sorted({max(width, round(count * part / PARTS)) for part in range(1, PARTS + 1)}):
        part = slice(end - width, end)
        known = np.isfinite(loss[part]) & (tokens[part] > 0)
        if known.any():
            yield end - 1, float(np.average(loss[part][known], weights=tokens[part][known]))


def of_point(courses: Sequence[Sequence[Sequence[float]]]) -> dict[str, list[Any]] | None:
    """The course of a point, from one course per seed: columns by name, means over the seeds at the steps that all of them have.

    A row of a course: [step, seconds, amount, value]. The ranges, from the lowest seed to the highest, are None for a single seed.
    Returns None if there is no such step.
    """
    by_step = [{int(row[0]): row for row in one} for one in courses]
    steps = sorted(set.intersection(*(set(one) for one in by_step))) if by_step else []
    if not steps:
        return None
    found: dict[str, list[Any]] = {"step": steps}
    for column, name in enumerate(("seconds", "amount", "objective"), start=1):
        values = [[one[step][column] for one in by_step] for step in steps]
        found[name] = [math.fsum(v) / len(v) for v in values]
        found[f"{name}_range"] = [[min(v), max(v)] if len(v) > 1 else None for v in values]
    return found


def front(points: Sequence[Mapping[str, Any]], axis: Axis, sign: int) -> list[dict[str, Any]]:
    """The Pareto front: evaluations in the rows of `results.tell` for which no other is as good for as little; ascending by `axis`.

    Of equal ones the first in the order of the rows. `sign`: 1 if less is better, else -1.
    """
    known = [
        (row["course"][axis][i], sign * row["course"]["objective"][i], order, i)
        for order, row in enumerate(points)
        if row["course"] is not None
        for i in range(len(row["course"]["step"]))
    ]
    found, best = [], math.inf
    for _, value, order, i in sorted(known):
        if value < best:
            best = value
            row = points[order]
            found.append({"point": row["point"], **{name: column[i] for name, column in row["course"].items()}})
    return found


def reached(row: Mapping[str, Any], target: float, sign: int) -> dict[str, Any] | None:
    """When a row's course first reached a value as good as `target`; None if it never did."""
    columns = row["course"] or {"objective": []}
    for i, value in enumerate(columns["objective"]):
        if sign * value <= sign * target:
            return {"point": row["point"], **{name: column[i] for name, column in columns.items()}}
    return None
