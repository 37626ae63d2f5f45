"""A few figures of a cell's run, from its records.

Runs anywhere: in the sweep's driver, which records them when a cell ends, so that readers need not open ten thousand runs; and in
the user's shell while a cell trains. Must not import torch or ray.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from raydist.observe.summary import WINDOW, rates
from raydist.records import Event
from raydist.report.summary import evals
from raydist.report.sweep.time_to_loss import PARTS, course
from raydist.run.directory import RunDir
from raydist.run.log import SINGLE, Segment, merge, read_events, read_segments
from raydist.run.status import last_word
from raydist.run.sweep_state import CellState


def measure(run: RunDir) -> dict[str, Any]:
    """The figures of a run: {"steps", "tokens", "loss", "eval_loss", "tokens_per_second", "grad_noise_scale", "course"}.

    None if not reported. `loss`: of the last tenth of its steps, by their tokens; `tokens_per_second`: of its newest
    attempt's last 50 steps; `grad_noise_scale`: the last known one, in sequences; `course`: see time_to_loss.py. Raises
    StorageError.
    """
    return figures(read_segments(run, SINGLE), read_events(run))


def figures(segments: Sequence[Segment], events: Sequence[Event]) -> dict[str, Any]:
    """The same from records that were read already."""
    rows = merge(list(segments))
    held_out = {step: loss for step, loss in evals(events).items() if loss is not None and math.isfinite(loss)}
    count = rows.num_rows
    last = rows.slice(count - max(1, round(count / PARTS))) if count else rows
    loss, tokens = (np.asarray(last[name], dtype=np.float64) for name in ("loss", "tokens"))
    trained = np.isfinite(loss) & (tokens > 0)
    noise = rows["grad_noise_scale"].drop_null()
    newest = rows.slice(max(0, count - WINDOW - 1)).to_pylist()
    newest = [row for row in newest if row["attempt"] == newest[-1]["attempt"]]
    return {
        "steps": rows["step"][-1].as_py() if count else 0,
        "tokens": int(np.sum(np.asarray(rows["tokens"], dtype=np.int64))),
        "loss": float(np.average(loss[trained], weights=tokens[trained])) if trained.any() else None,
        "eval_loss": held_out[max(held_out)] if held_out else None,
        "tokens_per_second": rates(newest[1:] or newest)["tokens_per_second"],
        "grad_noise_scale": noise[-1].as_py() if len(noise) else None,
        "course": course(segments, events),
    }


def spent(state: CellState, run: RunDir, now: float) -> tuple[float, float]:
    """(seconds, GPU-hours) in which a cell had workers; if its driver was killed, until the run's last record. `now`: Unix time.

    Raises StorageError.
    """
    seconds = gpu_hours = 0.0
    for number, stretch in enumerate(state.stretches):
        end = stretch.end
        if end is None:
            later = state.stretches[number + 1].start if number + 1 < len(state.stretches) else now
            end = min(later, _last_record(run, later))
        length = max(0.0, end - stretch.start)
        seconds += length
        gpu_hours += length * stretch.gpus / 3600
    return seconds, gpu_hours


def _last_record(run: RunDir, before: float) -> float:
    """Unix time of the last record that a run wrote before that time."""
    state = last_word(run)
    times = [event.at for event in read_events(run)] + ([] if state is None else [state["heartbeat_at"]])
    return max((at for at in times if at <= before), default=0.0)
