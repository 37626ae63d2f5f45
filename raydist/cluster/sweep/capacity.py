"""How many trials of a sweep can train at once, so that none waits for workers that another trial holds.

Runs anywhere. Pure: tested over random clusters.

All workers are assumed to be as large as the largest. A worker takes at most one place of that size, on whichever node Ray puts
it. So k trials of w workers leave at least (places - k w) places free, and one more fits if there are (k + 1) w places. Idle
workers count like busy ones: each trial has one slot of workers, and there are no more slots than trials at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from raydist.cluster.nodes import amount, places
from raydist.errors import PreflightError
from raydist.spec import JobSpec


@dataclass(frozen=True, slots=True)
class Shape:
    """The workers of a trial: how many, and the resources of each."""

    workers: int
    cpus: float
    gpus: float

    @property
    def each(self) -> dict[str, float]:
        """A worker's resources, without those that are 0."""
        return {name: count for name, count in (("CPU", self.cpus), ("GPU", self.gpus)) if count}


def asked(job: JobSpec, gpus: float, nodes: Sequence[Mapping[str, float]]) -> Shape:
    """The shape that a job would have alone: as many workers as it may have and as fit. `gpus`: per worker."""
    cluster = job.cluster
    shape = Shape(cluster.most, cluster.cpus_per_worker, gpus)
    fits = job.parallel.whole(places(nodes, shape.each, job.parallel.together))
    return shape if fits >= cluster.most else Shape(max(cluster.least, fits), shape.cpus, shape.gpus)


def at_once(nodes: Sequence[Mapping[str, float]], shapes: Iterable[Shape], asked: int | None = None) -> int:
    """Trials that train at once: at least 1, at most `asked`. `nodes`: the total resources of each.

    Raises PreflightError if a shape does not fit even alone; the error has that shape.
    """
    kinds = set(shapes)
    for shape in sorted(kinds, key=lambda s: (s.workers, s.cpus, s.gpus)):
        fits = places(nodes, shape.each)
        if fits < shape.workers:
            total = {name: sum(node.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU")}
            raise PreflightError(
                f"a trial asks for {shape.workers} workers of {amount(shape.each)}, the cluster has {amount(total)} on "
                f"{len(nodes)} node{'s' if len(nodes) != 1 else ''}: {fits} would fit",
                "reduce cluster: of the base or of that trial, or add nodes",
            )
    fit = room(nodes, kinds)
    return fit if asked is None else min(fit, asked)


def room(nodes: Iterable[Mapping[str, float]], shapes: Iterable[Shape]) -> int:
    """Trials that fit at once, in any mix of those shapes; at least 1."""
    kinds = set(shapes)
    largest = Shape(max(s.workers for s in kinds), max(s.cpus for s in kinds), max(s.gpus for s in kinds))
    # `largest` may fit nowhere: then one trial trains at a time, and its workers end before the next ones start.
    return max(1, places(nodes, largest.each) // largest.workers)
