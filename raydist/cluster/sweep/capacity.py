"""How many trials of a sweep can train at once, so that none waits for workers that another trial holds.

Runs anywhere. Pure: tested over random clusters.

All workers are assumed to be as large as the largest. A worker takes at most one place of that size, on whichever node Ray puts
it. So k trials of w workers leave at least (places - k w) places free, and one more fits if there are (k + 1) w places. Idle
workers count like busy ones: each trial has one slot of workers, and there are no more slots than trials at once. Where the trials
differ in the nodes that they may use, the fewest places count: the other trials' workers may all be there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raydist.cluster.nodes import amount, places, usable
from raydist.errors import PreflightError
from raydist.spec import JobSpec
from raydist.spec.resources import ResourcesSpec


@dataclass(frozen=True, slots=True)
class Shape:
    """The workers of a trial: how many, the resources of each without those that are 0, and where they may be."""

    workers: int
    each: Mapping[str, float]
    asked: ResourcesSpec = field(default_factory=ResourcesSpec)

    def places(self, nodes: Iterable[Mapping[str, Any]], together: int = 1) -> int:
        """The workers that fit on the nodes which the trial may use, as `ray.nodes()` lists them."""
        return places([node["Resources"] for node in nodes if usable(node, self.asked)], self.each, together)


def asked(job: JobSpec, gpus: float, nodes: Sequence[Mapping[str, Any]]) -> Shape:
    """The shape that a job would have alone: as many workers as it may have and as fit. `gpus`: per worker."""
    cluster = job.cluster
    each = {name: count for name, count in cluster.each(gpus).items() if count}
    shape = Shape(cluster.most, each, cluster.resources)
    fits = job.parallel.whole(shape.places(nodes, job.parallel.together))
    return shape if fits >= cluster.most else replace(shape, workers=max(cluster.least, fits))


def different(shapes: Iterable[Shape]) -> list[Shape]:
    """Each shape once."""
    return list({repr(shape): shape for shape in shapes}.values())


def at_once(nodes: Sequence[Mapping[str, Any]], shapes: Iterable[Shape], asked: int | None = None) -> int:
    """Trials that train at once: at least 1, at most `asked`. `nodes`: as `ray.nodes()` lists them.

    Raises PreflightError if a shape does not fit even alone; the error has that shape.
    """
    kinds = different(shapes)
    for shape in sorted(kinds, key=lambda s: (s.workers, s.each.get("CPU", 0.0), s.each.get("GPU", 0.0))):
        fits = shape.places(nodes)
        if fits < shape.workers:
            there = [node["Resources"] for node in nodes if usable(node, shape.asked)]
            total = {name: sum(node.get(name, 0.0) for node in there) for name in {"CPU": 0, "GPU": 0, **shape.each}}
            raise PreflightError(
                f"a trial asks for {shape.workers} workers of {amount(shape.each)}, the cluster has {amount(total)} on "
                f"{len(there)} node{'s' if len(there) != 1 else ''}: {fits} would fit",
                "reduce cluster: of the base or of that trial, or add nodes",
            )
    fit = room(nodes, kinds)
    return fit if asked is None else min(fit, asked)


def room(nodes: Sequence[Mapping[str, Any]], shapes: Iterable[Shape]) -> int:
    """Trials that fit at once, in any mix of those shapes; at least 1."""
    kinds = different(shapes)
    workers = max(shape.workers for shape in kinds)
    each = {name: max(s.each.get(name, 0.0) for s in kinds) for name in {n: 0 for s in kinds for n in s.each}}
    # The largest may fit nowhere: then one trial trains at a time, and its workers end before the next ones start.
    return max(1, min(replace(shape, each=each).places(nodes) for shape in kinds) // workers)
