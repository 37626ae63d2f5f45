"""While a sweep runs: how long it will still take, and what that will cost.

Runs anywhere, from the sweep's folder alone. Must not import torch or ray.

A running cell needs its own time per step for each step that is left. Of a cell that has not begun only the others are known: it is
taken to need the mean time of the cells that have ended, or, before the first has ended, of those that run. As many cells as run
now are taken to run at once until the end.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from raydist.report.sweep.figures import spent
from raydist.run.lease import driven_since
from raydist.run.status import read_state
from raydist.run.sweep_directory import CellNote, SweepDir
from raydist.run.sweep_state import DONE, CellState, fold
from raydist.spec.sweep import read_stored


@dataclass(frozen=True)
class Remaining:
    """What is left of `cells` cells: seconds until the end, GPU-hours, and their cost, None without a price. `most`: cells may
    still end earlier than that, or not be chosen at all."""

    cells: int
    seconds: float
    gpu_hours: float
    cost: float | None
    most: bool


@dataclass(frozen=True)
class Running:
    """A cell that runs: the seconds it has used, those it still needs (None: unknown), and its GPUs."""

    used: float
    left: float | None
    gpus: float


def tell(folder: SweepDir, now: float | None = None) -> Remaining | None:
    """What is left at `now`, a Unix time; None if nothing is, if no driver has the sweep, or if no cell tells its pace yet. Raises
    StorageError."""
    now = time.time() if now is None else now
    since = driven_since(folder, now)
    if since is None:
        return None
    spec, _ = read_stored(folder)
    events = folder.events()
    states, notes = fold(events), folder.cells(events)
    ended, running, later = list[float](), list[Running](), list[float]()
    for note in notes:
        state = states.get(note.id, CellState())
        used = spent(state, folder.run(note.id), now)[0] if state.stretches else 0.0
        if state.status in DONE:
            ended.append(used)
        elif state.status == "running" and state.stretches[-1].start >= since:
            running.append(Running(used, _left(folder, note, used), state.stretches[-1].gpus))
        else:
            later.append(used if state.status == "paused" else 0.0)
    if spec.search.chooses:
        later += [0.0] * ((spec.array.samples or 0) * spec.array.seeds - len(notes))
    reckoned = reckon(ended, running, later)
    if reckoned is None:
        return None
    seconds, gpu_hours = reckoned
    rate = spec.limits.cost_per_gpu_hour
    limited = spec.limits.hours is not None or spec.limits.gpu_hours is not None
    most = limited or spec.search.chooses or spec.scheduler.name != "none"
    cost = None if rate is None else gpu_hours * rate
    return Remaining(len(running) + len(later), seconds, gpu_hours, cost, most)


def reckon(ended: Sequence[float], running: Sequence[Running], later: Sequence[float]) -> tuple[float, float] | None:
    """(seconds until the last cell has ended, GPU-hours until then). `ended`: seconds of the cells that have ended; `later`: of
    those that will still begin or continue, the seconds that they have used. None if nothing runs, or no cell tells its pace."""
    usual = _mean(ended or [one.used + one.left for one in running if one.left is not None])
    if not running or usual is None:
        return None
    present = [max(usual - one.used, 0.0) if one.left is None else one.left for one in running]
    waiting = [max(usual - used, 0.0) for used in later]
    gpus = [one.gpus for one in running]
    busy = math.fsum(left * of_cell for left, of_cell in zip(present, gpus, strict=True))
    busy += math.fsum(waiting) * math.fsum(gpus) / len(gpus)
    return _end(present, waiting), busy / 3600


def _left(folder: SweepDir, note: CellNote, used: float) -> float | None:
    """Seconds that a running cell still needs at its pace; None before its first step, or for a job in epochs."""
    step = int(read_state(folder.run(note.id)).get("step") or 0)
    return used / step * max(note.steps - step, 0) if step and note.steps is not None else None


def _end(present: Sequence[float], waiting: Sequence[float]) -> float:
    """Seconds until the last cell ends, if each place takes the next cell when its own has ended."""
    places = [*present]
    heapq.heapify(places)
    for seconds in waiting:
        heapq.heapreplace(places, places[0] + seconds)
    return max(places)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
