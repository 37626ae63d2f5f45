"""A job's speed on 8 to 1,024 GPUs, and where the rest goes: `raydist plan --scaling`.

Runs anywhere. Plain python: no torch, no ray. On top of the forecast of a step (speed.py), which has no slow rank and no failure:

    stragglers  the slowest of N ranks ends each step: the expected largest of N normal variables of that jitter (Blom 1958)
    failures    one every MTBF / N; each loses on average half an interval and the restart (Young 1974, Daly 2006)
    checkpoints one each interval, which stops training for the time of the copy
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING

from raydist.checkpoint.interval import apart
from raydist.planner.facts import Machine
from raydist.planner.speed import Speed

if TYPE_CHECKING:
    from raydist.spec import JobSpec

JITTER = 0.01
"""Standard deviation of a rank's time for a step over its mean."""
RESTART_S = 60.0
GPUS = tuple(2**n for n in range(3, 11))


@dataclass(frozen=True, slots=True)
class Assumed:
    """`mtbf_h`: `checkpoint.mtbf_h`, hours between two failures of one GPU and its share of everything else; its default: 419 in 54
    days on 16,384 H100s (arXiv 2407.21783, section 3.3.4) are one every 50,700 hours. `restart_s`: from a failure to the first new
    step."""

    mtbf_h: float
    jitter: float = JITTER
    restart_s: float = RESTART_S


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint: the seconds that it stops training, and those until it is written, within which no other can begin."""

    stall_s: float
    write_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run has measured on so many ranks, as medians: of a step, of a checkpoint, and of what a copy in memory costs, None
    where it has none. `jitter`: as in Assumed; None if its telemetry is too short to tell."""

    run: str
    ranks: int
    step_s: float
    save: Save | None = None
    copy_s: float | None = None
    jitter: float | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """The job on so many GPUs. The shares add up to 1: `useful` is computation, the others are the wall time's losses.

    `interval_s`: between two checkpoints; `mtbf_s`: between two failures of the run. `efficiency`: tokens/s over those of the
    fewest GPUs, per GPU.
    """

    gpus: int
    global_batch: int
    tokens_per_second: float
    interval_s: float
    mtbf_s: float
    shares: dict[str, float]
    efficiency: float = 1.0


def slowest(ranks: int) -> float:
    """The expected largest of so many independent standard normal variables: Blom's approximation, 1% high at most."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def lost(interval_s: float, save_s: float, mtbf_s: float, restart_s: float) -> tuple[float, float]:
    """Shares of the wall time that checkpoints and failures take, to first order; together less than 1."""
    saves = save_s / (interval_s + save_s)
    failures = min(1.0, (restart_s + (interval_s + save_s) / 2) / mtbf_s)
    return saves * (1 - failures), failures


def point(gpus: int, batch: int, step: Speed, save: Save, assumed: Assumed) -> Point:
    """One point of the curve, from the forecast of its step."""
    late = step.seconds * assumed.jitter * slowest(gpus)
    whole = step.seconds + late
    mtbf = assumed.mtbf_h * 3600 / gpus
    every = apart(save.stall_s, save.write_s, mtbf)
    saves, failures = lost(every, save.stall_s, mtbf, assumed.restart_s)
    training = 1 - saves - failures
    parts = {
        "useful": step.compute,
        "communication": step.exposed,
        "pipeline": step.waits,
        "offload": step.offload,
        "stragglers": late,
    }
    shares = {name: seconds / whole * training for name, seconds in parts.items()}
    speed = step.tokens_per_second * step.seconds / whole * training
    return Point(gpus, batch, speed, every, mtbf, {**shares, "checkpoints": saves, "failures": failures})


def curve(points: Iterable[Point]) -> list[Point]:
    """The points with their efficiency, over the speed of a GPU at the first."""
    found = list(points)
    first = found[0].tokens_per_second / found[0].gpus if found else 0.0
    # Failures may leave the fewest GPUs no time to train: more of them have less.
    return [replace(p, efficiency=p.tokens_per_second / p.gpus / first if first else 0.0) for p in found]


def forecast(
    job: JobSpec,
    machine: Machine,
    step: Callable[[JobSpec, Machine], Speed],
    save: Callable[[Machine], Save],
    assumed: Assumed,
    *,
    weak: bool,
) -> tuple[list[Point], dict[int, str]]:
    """The curve, and why there is no point for some numbers of GPUs. `weak`: the global batch grows with the GPUs, from that of
    the job's own number."""
    points, refused = [], {}
    unit = job.parallel.unit
    for gpus in GPUS:
        batch = job.train.global_batch * gpus // machine.ranks if weak else job.train.global_batch
        if gpus % unit:
            refused[gpus] = f"whole replicas have {unit} ranks each"
            continue
        if batch < gpus // job.parallel.replica or batch < 1:
            refused[gpus] = f"a global batch of {batch} has fewer sequences than replicas"
            continue
        here = replace(machine, ranks=gpus)
        asked = job.with_fields({"train.global_batch": batch, "cluster.workers": gpus, "cluster.spares": 0})
        points.append(point(gpus, batch, step(asked, here), save(here), assumed))
    return curve(points), refused
