"""What a run has measured for `raydist plan --from RUN`: its steps, its checkpoints, and how much its ranks differ.

Runs anywhere. Must not import torch or ray.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from raydist.errors import UsageError
from raydist.planner.scaling import Measured, Save
from raydist.report.telemetry_reader import COLUMNS, Track, gather
from raydist.run import telemetry_log
from raydist.run.directory import RunDir
from raydist.run.log import read_events, read_steps

_READINGS = 64
"""Of a rank in one attempt, at least, to tell its jitter."""


def measured(run: RunDir) -> Measured:
    """Medians of its newest attempt with a step. Raises UsageError for a run without steps."""
    rows = read_steps(run, ("seconds", "attempt", "world_size")).to_pylist()
    if not rows:
        raise UsageError(f"--from {run.uri}: the run has no step yet", "name one that has trained")
    newest = rows[-1]["attempt"]
    steps = [row["seconds"] for row in rows if row["attempt"] == newest]
    events = read_events(run)
    begun = next((e.at for e in reversed(events) if e.kind == "attempt_started" and e.data["attempt"] == newest), 0.0)
    saves = [e.data for e in events if e.kind == "checkpoint_saved" and e.at >= begun]
    copies = [e.data["copy_seconds"] for e in events if "copy_seconds" in e.data and e.at >= begun]
    save = None
    if saves:
        save = Save(*(statistics.median(data[name] for data in saves) for name in ("stall_seconds", "seconds")))
    ranks = rows[-1]["world_size"]
    readings = gather(telemetry_log.parts(run, COLUMNS), sum(steps), ranks)
    return Measured(
        run.name,
        ranks,
        statistics.median(steps),
        save,
        copies[-1] if copies else None,
        jitter(readings.of(newest)),
    )


def jitter(tracks: Sequence[Track]) -> float | None:
    """Standard deviation of a rank's time for a step over the mean, from counters that are read at any time within a step.

    What all ranks have in common, such as longer sequences, is no jitter and is taken off. Of the rest, the variance of what a rank
    computes between two readings grows with the steps between them; the time within a step at which they were read adds as much to
    few steps as to many, so the growth alone is jitter. Ranks that always differ count, too. None with one rank, or few readings.
    """
    found = [track.by_step("compute") for track in tracks]
    count = min((len(steps) for steps, _ in found), default=0)
    if len(found) < 2 or count < _READINGS:
        return None
    at = np.linspace(max(steps[0] for steps, _ in found), min(steps[-1] for steps, _ in found), count)
    each = np.stack([np.interp(at, steps, seconds) for steps, seconds in found])
    a_step, apart = (each[:, -1] - each[:, 0]) / (at[-1] - at[0]), at[1] - at[0]
    rest = each - each.mean(axis=0)
    rest -= np.outer(a_step - a_step.mean(), at - at[0])

    def variance(lag: int) -> float:
        return float(np.mean((rest[:, lag:] - rest[:, :-lag]) ** 2)) * len(found) / (len(found) - 1)

    lag = count // 16
    # Without its trend a walk of `count` steps varies less over `lag` of them.
    within = (variance(lag) - variance(1)) / ((lag - 1) * apart * (1 - lag / count))
    between = float(np.var(a_step, ddof=1))
    return float(np.sqrt(max(within, 0.0) + between) / a_step.mean())
