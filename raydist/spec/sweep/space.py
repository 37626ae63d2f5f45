"""The axes of a sweep, and the points that its array has on them.

Runs anywhere. A draw is a pure function of (seed, number of the draw, field): one parameter more, or more samples, change none of
the draws there were.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from raydist.redact import redact
from raydist.spec.sweep import names
from raydist.spec.sweep.models import ArraySpec, SweepSpec

MOST_CELLS = 100_000
MOST_VALUES = 10_000
"""Of one parameter: each is compared with the others."""
DRAWS = ("uniform", "log_uniform", "int_uniform", "choice")
DIGITS = 5
"""Of a drawn number: enough to tell cells apart, few enough to read, and the same on every libm."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One parameter: the values it takes, or the range it is drawn from."""

    name: str
    """As the file says it."""
    field: str
    """Of the job, dotted."""
    kind: Literal["values", "uniform", "log_uniform", "int_uniform"]
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0

    @property
    def fixed(self) -> bool:
        """Whether it has the same value in all cells."""
        return self.kind == "values" and len(self.values) == 1

    def at(self, u: float) -> Any:
        """The value at `u` in [0, 1). Numbers that are not whole have 5 significant digits."""
        match self.kind:
            case "values":
                return self.values[int(u * len(self.values))]
            case "int_uniform":
                return int(self.low) + int(u * (self.high - self.low + 1))
            case "uniform":
                value = self.low + u * (self.high - self.low)
            case "log_uniform":
                value = self.low * (self.high / self.low) ** u
        return self.tidy(value)

    def tidy(self, value: float) -> Any:
        """A value of the range, as cells have it: whole, or of 5 significant digits."""
        if self.kind == "int_uniform":
            return int(value)
        return min(max(float(f"{value:.{DIGITS}g}"), self.low), self.high)


Point = Mapping[str, Any]
"""Field -> value, in the order of the file."""


def axes(spec: SweepSpec) -> tuple[list[Axis], list[str]]:
    """The parameters of an array, and what is wrong with them: lines without the file's name.

    Those of a `list` have all values that its entries give.
    """
    found: list[Axis] = []
    problems: list[str] = []
    if spec.array.type == "list":
        columns: dict[str, list[Any]] = {}
        for number, entry in enumerate(spec.array.parameters):
            if not entry:
                problems.append(f"array.parameters[{number}]: is empty; give at least one value")
            for name, value in entry.items():
                columns.setdefault(name, [])
                if value not in columns[name]:
                    columns[name].append(value)
        named: list[tuple[str, str, Any]] = [(f"array.parameters.{name}", name, seen) for name, seen in columns.items()]
    else:
        named = []
        for number, entry in enumerate(spec.array.parameters):
            if len(entry) != 1:
                problems.append(
                    f"array.parameters[{number}]: has {len(entry)} names; write one an entry, `- name: [values]`"
                )
            named += [(f"array.parameters.{name}", name, values) for name, values in entry.items()]
    for place, name, given in named:
        dotted = names.field(name)
        if dotted is None:
            problems.append(f"{place}: unknown parameter; {names.remedy(name)}")
            continue
        if twice := next((axis for axis in found if axis.field == dotted), None):
            problems.append(f"{place}: is {dotted}, as {twice.name} is; take one of them")
            continue
        axis = _axis(spec.array, name, dotted, given)
        if isinstance(axis, str):
            problems.append(f"{place}: {axis}")
        elif redact(axis.values) != axis.values:
            # Its values name the cells, and are readable on storage.
            problems.append(f"{place}: {redact(given)!r} was given with secrets; leave them to the nodes' environment")
        else:
            found.append(axis)
    lengths = {axis.name: len(axis.values) for axis in found if not axis.fixed}
    if spec.array.type == "zip" and len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} {count}" for name, count in lengths.items())
        problems.append(f"array.parameters: lists of different lengths cannot be zipped ({shown}); make them equal")
    if spec.array.type == "parameter_sweep" and spec.array.samples is None and not problems:
        count = math.prod(len(axis.values) for axis in found) * spec.array.seeds
        if count > MOST_CELLS:
            problems.append(
                f"array.parameters: make {count:,} cells; {MOST_CELLS:,} at most, or draw some: search: random"
            )
    return found, problems


def _axis(array: ArraySpec, name: str, dotted: str, given: Any) -> Axis | str:
    """The parameter, or what is wrong with it."""
    if isinstance(given, dict) and len(given) == 1 and next(iter(given)) in DRAWS:
        kind, bounds = next(iter(given.items()))
        if kind == "choice":
            given = bounds if isinstance(bounds, list) else [bounds]
        elif array.type != "random":
            return f"{kind} is drawn, and array.type is {array.type}; write array.type: random, with samples: N"
        else:
            return _range(name, dotted, kind, bounds)
    if not isinstance(given, list):
        return Axis(name, dotted, "values", (given,))
    if not given:
        return "an empty list has no value; give at least one"
    if len(given) > MOST_VALUES:
        return f"{len(given):,} values are more than {MOST_VALUES:,}, the limit; draw from a range, or leave some out"
    if array.type != "list" and (twice := [v for i, v in enumerate(given) if v in given[:i]]) and array.type != "zip":
        return f"{twice[0]!r} stands twice; leave one out, or repeat cells by array.seeds"
    return Axis(name, dotted, "values", tuple(given))


def _range(name: str, dotted: str, kind: Any, bounds: Any) -> Axis | str:
    numbers = isinstance(bounds, list) and len(bounds) == 2
    if not numbers or not all(
        isinstance(b, int | float) and not isinstance(b, bool) and math.isfinite(b) for b in bounds
    ):
        return f"{kind}: {bounds!r} is no range; write {{{kind}: [lowest, highest]}}"
    low, high = bounds
    if low >= high:
        return f"{kind}: {bounds!r} does not ascend; write the lowest first"
    if kind == "log_uniform" and low <= 0:
        return f"log_uniform: {low!r} has no logarithm; begin above 0, or use uniform"
    if kind == "int_uniform" and not (float(low).is_integer() and float(high).is_integer()):
        return f"int_uniform: {bounds!r} are not whole numbers; write whole ones, or use uniform"
    return Axis(name, dotted, kind, low=low, high=high)


def points(spec: SweepSpec, space: list[Axis]) -> Iterator[Point]:
    """The points of the array in their order; for `search: optuna` and `bayes` none, for results choose them."""
    array, seed = spec.array, spec.search.seed
    if spec.search.chooses:
        return
    fields = [axis.field for axis in space]
    if array.type == "random":
        for number in range(array.samples or 0):
            yield draw(space, seed, number)
    elif array.type == "list":
        for entry in array.parameters:
            yield {names.field(name) or name: value for name, value in entry.items()}
    elif array.type == "zip":
        length = max(len(axis.values) for axis in space)
        for row in zip(*(axis.values * length if axis.fixed else axis.values for axis in space), strict=False):
            yield dict(zip(fields, row, strict=True))
    elif spec.search.name == "random":
        yield from _some(space, seed, array.samples or 0)
    else:
        for row in itertools.product(*(axis.values for axis in space)):
            yield dict(zip(fields, row, strict=True))


def draw(space: list[Axis], seed: int, number: int) -> Point:
    """Draw `number`, counted from 0."""
    return {axis.field: axis.at(uniform(seed, number, axis.field)) for axis in space}


def _some(space: list[Axis], seed: int, samples: int) -> Iterator[Point]:
    """So many different points of the grid, or all of them if it has no more."""
    count = math.prod(len(axis.values) for axis in space)
    seen: set[int] = set()
    numbers = itertools.count()
    while len(seen) < min(samples, count):
        place = int(uniform(seed, next(numbers), "") * count)
        if place not in seen:
            seen.add(place)
            point = {}
            for axis in reversed(space):
                place, which = divmod(place, len(axis.values))
                point[axis.field] = axis.values[which]
            yield {axis.field: point[axis.field] for axis in space}


def uniform(seed: int, number: int, key: str) -> float:
    """In [0, 1), by blake2b of its arguments: 53 bits."""
    digest = hashlib.blake2b(f"{seed}:{number}:{key}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
