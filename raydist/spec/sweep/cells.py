"""A sweep -> its cells: each a whole job spec, or what is wrong with it. Pure, and known before anything starts.

Runs anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from raydist.errors import SpecError
from raydist.spec.load import Layer, merge, merged, nest, resolve
from raydist.spec.models import JobSpec
from raydist.spec.sweep import extent, names, space
from raydist.spec.sweep.equal import adjusted, tokens
from raydist.spec.sweep.models import SweepSpec, options_for

_NAMED = ("model.name", "parallel.strategy", "observe", "deepspeed")
"""Fields that are more than values: they name extensions, or files."""
_SHOWN = 20
_PREFIX = 70


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a sweep. Cells of one `point` have the same parameters, and differ in their seed."""

    index: int
    """Its place in the sweep's order, from 0."""
    id: str
    """Name of its run: what it is in short, and a hash of sweep's name, parameters and seed. The same whenever it is made."""
    point: int
    parameters: Mapping[str, Any]
    """Field -> value, as the array has it."""
    seed: int
    spec: JobSpec | None
    """None if there are problems."""
    adjusted: Mapping[str, Any] = field(default_factory=dict)
    """Field -> value that was made to fit: see raydist/spec/sweep/equal.py."""
    notes: tuple[str, ...] = ()
    """What of that the user should know."""
    problems: tuple[str, ...] = ()

    @property
    def tokens(self) -> int | None:
        """steps x global_batch x context; None for a job in epochs, or with problems."""
        return tokens(self.spec) if self.spec is not None else None

    @property
    def job(self) -> JobSpec:
        """The spec of a cell that has no problems."""
        assert self.spec is not None, f"{self.id}: {self.problems}"
        return self.spec


class Sweep:
    """A sweep's file and its base, both read and checked: what makes the cells. Made by `load_sweep`."""

    def __init__(
        self, name: str, source: str, spec: SweepSpec, layers: list[Layer], base: JobSpec, axes: list[space.Axis]
    ) -> None:
        self.name, self.source, self.spec, self.base, self.axes = name, source, spec, base, axes
        self._layers = layers
        self._tree, _ = merged(layers)
        self._whole = {key: getattr(base, key) for key in JobSpec.model_fields}

    def cells(self) -> list[Cell]:
        """All cells in their order: every point with the first seed, then with the second. Of points that come twice, the first.

        For `search: optuna` and `bayes` there are none yet: `cell` makes them, and `scouts` are those that can be looked at before.
        """
        found: dict[str, Cell] = {}
        points = list(space.points(self.spec, self.axes))
        for repeat in range(self.spec.array.seeds):
            for number, point in enumerate(points):
                cell = self.cell(point, len(found), number, repeat)
                found.setdefault(cell.id, cell)
        return list(found.values())

    def scouts(self) -> list[Cell]:
        """Cells from the ends of the space, of which a search may choose any: what holds for them holds for those between."""
        return [self.cell(point, i, i) for i, point in enumerate(extent.extremes(self.axes))]

    def most(self, chosen: Iterable[space.Point] = ()) -> int:
        """Points that a search may choose in all, those `chosen` included: `array.samples`, or as many as there are."""
        size, samples = extent.size(self.axes), self.spec.array.samples or 0
        elsewhere = sum(not extent.holds(self.axes, point) for point in chosen)
        return samples if size is None else min(samples, size + elsewhere)

    def cell(self, point: space.Point, index: int, number: int, repeat: int = 0) -> Cell:
        """The cell of a point: field -> value. `number` is the point's, `repeat` that of its seed, both from 0."""
        asked = point.get("train.seed", self.base.train.seed)
        seed = (asked + repeat) % 2**63 if isinstance(asked, int) else self.base.train.seed
        made = cell_id(self.name, point, seed, repeats=self.spec.array.seeds > 1)
        fitted, notes = adjusted(self.base, point, self.spec.equal)
        fields = {**point, **fitted, "train.seed": seed if isinstance(asked, int) else asked, "name": made}
        job, problems = self._job(fields, point)
        if job is not None and self.spec.objective.metric == "eval_loss" and job.eval.every is None:
            problems.append(
                f"{self.source}: eval.every: is null, so eval_loss is never reported; set it, or objective.metric: loss"
            )
        return Cell(
            index, made, number, dict(point), seed, None if problems else job, fitted, tuple(notes), tuple(problems)
        )  # fmt: skip

    def _job(self, fields: Mapping[str, Any], point: space.Point) -> tuple[JobSpec | None, list[str]]:
        if "deepspeed" not in self._tree and not any(name.startswith(_NAMED) for name in point):
            # Most sections are the base's: they are checked, and in memory, once. 10,000 cells take seconds and megabytes so.
            own: dict[str, Any] = {}
            for name, value in fields.items():
                own = merge(own, nest(name, value))
            changed = {key: value for key, value in merge(self._tree, own).items() if value is not self._tree.get(key)}
            try:
                return JobSpec.model_validate({**self._whole, **changed}), []
            except ValidationError:
                pass  # all of it together tells better what is wrong
        layer = Layer({}, {})
        for name, value in fields.items():
            layer = layer.with_field(name, value, self.source)
        try:
            return resolve([*self._layers, layer], self.source, warn=lambda line: None), []
        except SpecError as error:
            return None, error.message.splitlines()


def cell_id(sweep: str, point: space.Point, seed: int, repeats: bool) -> str:
    """`lr0.0001-batch64-k3m5x2qa`; with `repeats` it includes the seed. It is valid as a run's name.

    The order of parameters, and whether a number is written 1 or 1.0, make no difference to the hash: 40 bits of blake2b.
    """
    parts = [names.label(name) + _short(value) for name, value in point.items()]
    prefix = "-".join([*parts, f"seed{seed}"] if repeats else parts)
    prefix = re.sub(r"[^A-Za-z0-9._]+", "-", prefix.replace("+", "")).strip("-._")[:_PREFIX].strip("-._")
    identity = repr([sweep, sorted((name, _canonical(value)) for name, value in point.items()), seed])
    digest = hashlib.blake2b(identity.encode(), digest_size=5).digest()
    return f"{prefix or 'cell'}-{base64.b32encode(digest).decode().lower()}"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "-".join(map(_short, value)) if isinstance(value, list | tuple) else str(value).lower()


def _canonical(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_canonical, value))}]"
    return json.dumps(value, sort_keys=True, default=str) if isinstance(value, dict) else repr(value)


def check(sweep: Sweep, cells: Iterable[Cell]) -> None:
    """Raises SpecError if a cell is no valid job, or the scheduler's rungs are not on its way: a line for each problem.

    For `search: optuna` and `bayes`: if no cell that can come is one. Single ones that are none fail when they come.
    """
    cells = list(cells)
    if sweep.spec.search.chooses:
        scouts = sweep.scouts()
        cells += [cell for cell in scouts if not cell.problems] or scouts
    lines = _problems(cells)
    known = [cell.tokens for cell in cells if cell.tokens is not None]
    unfit = getattr(options_for(sweep.spec.scheduler), "unfit", None)
    if unfit is not None and known and (found := unfit(min(known))):
        field, what, remedy = found
        lines.append(f"{sweep.source}: scheduler.{field}: {what}; {remedy}")
    if lines:
        more = [f"and {len(lines) - _SHOWN} problems more: --dry-run has them all"] if len(lines) > _SHOWN else []
        raise SpecError("\n".join(lines[:_SHOWN] + more))


def _problems(cells: list[Cell]) -> list[str]:
    """Each problem once, with the cells that have it."""
    having: dict[str, list[Cell]] = {}
    for cell in cells:
        for text in cell.problems:
            having.setdefault(text, []).append(cell)
    lines = []
    for text, them in having.items():
        which = f"all {len(cells)} cells" if len(them) == len(cells) > 1 else ", ".join(cell.id for cell in them[:3])
        more = f" and {len(them) - 3} more" if 3 < len(them) < len(cells) else ""
        lines.append(f"{text} (in {which}{more})")
    return lines
