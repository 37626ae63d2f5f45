"""How many cells of a sweep can train at the same time, so that none ever waits for workers that another one keeps.

Runs anywhere. Pure: tested over random clusters.

The workers of all cells are taken to be as large as the largest. A worker takes one place of that size at most, wherever Ray puts
it, so k cells of w workers leave at least (places - k w) free, and the next one fits as long as (k + 1) w are there. Workers that
wait for their next cell count like those that train: a cell has one slot of them, and there are no more slots than cells at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from raydist.errors import PreflightError
from raydist.spec.models import ClusterSpec


@dataclass(frozen=True, slots=True)
class Shape:
    """The workers of a cell: how many, and what each has."""

    workers: int
    cpus: float
    gpus: float

    @property
    def each(self) -> dict[str, float]:
        """A worker's resources, without those it has none of."""
        return {name: count for name, count in (("CPU", self.cpus), ("GPU", self.gpus)) if count}


def asked(cluster: ClusterSpec, gpus: float, nodes: Sequence[Mapping[str, float]]) -> Shape:
    """As many workers as a job with that `cluster` would have alone: the most it may have that fit. `gpus`: of each."""
    shape = Shape(cluster.most, cluster.cpus_per_worker, gpus)
    fits = places(nodes, shape.each)
    return shape if fits >= cluster.most else Shape(max(cluster.least, fits), shape.cpus, shape.gpus)


def places(nodes: Iterable[Mapping[str, float]], each: Mapping[str, float]) -> int:
    """Workers with resources `each` that fit on the nodes, whose totals are {"CPU": 8.0, "GPU": 4.0}."""
    return sum(
        min((math.floor(node.get(name, 0.0) / count + 1e-9) for name, count in each.items()), default=0)
        for node in nodes
    )


def at_once(nodes: Sequence[Mapping[str, float]], shapes: Iterable[Shape], asked: int | None = None) -> int:
    """Cells that train at the same time: at least 1, at most `asked`. `nodes`: the total resources of each.

    Raises PreflightError, naming it, if there is a shape of which not even one cell fits.
    """
    kinds = set(shapes)
    for shape in sorted(kinds, key=lambda s: (s.workers, s.cpus, s.gpus)):
        fits = places(nodes, shape.each)
        if fits < shape.workers:
            total = {name: sum(node.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU")}
            raise PreflightError(
                f"a cell asks for {shape.workers} workers of {_amount(shape.each)}, the cluster has {_amount(total)} on "
                f"{len(nodes)} node{'s' if len(nodes) != 1 else ''}: {fits} would fit",
                "ask less in cluster: of the base or of that cell, or add nodes",
            )
    fit = room(nodes, kinds)
    return fit if asked is None else min(fit, asked)


def room(nodes: Iterable[Mapping[str, float]], shapes: Iterable[Shape]) -> int:
    """Cells of those shapes that fit at the same time, whichever they are; 1 where none does."""
    kinds = set(shapes)
    largest = Shape(max(s.workers for s in kinds), max(s.cpus for s in kinds), max(s.gpus for s in kinds))
    # Where no cell could have all of the largest at once, one trains at a time, and its workers go before others come.
    return max(1, places(nodes, largest.each) // largest.workers)


def _amount(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{v:g} {k}{'s' if v != 1 else ''}" for k, v in resources.items() if v) or "nothing"
