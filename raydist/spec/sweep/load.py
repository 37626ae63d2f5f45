"""A sweep's file -> a Sweep; or every problem of it at once, with file, field, value and remedy.

Runs anywhere.
"""

from __future__ import annotations

import re
from pathlib import Path

from raydist.errors import SpecError
from raydist.spec.load import Layer, Overrides, overriding, read_layers, read_yaml, resolve
from raydist.spec.sweep.cells import Sweep
from raydist.spec.sweep.equal import DECIDES
from raydist.spec.sweep.models import SweepSpec
from raydist.spec.sweep.space import Axis, axes
from raydist.spec.validate import extensions, validate

LIVE = ("optim.lr", "optim.weight_decay", "optim.betas", "optim.eps", "optim.momentum", "optim.clip")
"""Fields whose change leaves a checkpoint usable, and so what pbt can explore."""


def load_sweep(path: str | Path, overrides: Overrides = (), name: str | None = None) -> Sweep:
    """The sweep of a YAML file. `overrides`: of the base job.

    `name` beats that of the file. Raises SpecError with all that is wrong with the file and the base, one line each; what is wrong
    with single cells is recorded in them (`Sweep.cells`, and `check` raises it).
    """
    path = Path(path)
    source = str(path)
    raw = read_yaml(path)
    if not isinstance(raw, dict):
        raise SpecError(f"{source}: holds {type(raw).__name__}, not fields; begin with base: and array:")
    if "train" in raw and not raw.keys() & {"base", "array"}:
        raise SpecError(f"{source}: is a job, not a sweep; train it with `raydist train {source}`")
    spec, problems = validate(SweepSpec, raw, {}, source, "`raydist schema --sweep` or docs/reference/sweep-spec.md")
    problems += extensions(SweepSpec, raw, {}, source)
    array_fits = spec is not None and not any(line.startswith(f"{source}: array") for line in problems)
    found, wrong = axes(spec) if spec is not None and array_fits else ([], [])
    if spec is not None:
        wrong += _together(spec, found)
    problems += [f"{source}: {line}" for line in wrong]
    base = raw.get("base")
    layers, job = [], None
    try:
        over = overriding(overrides)
        if isinstance(base, str):
            layers = [*_read(path.parent / base, source), over]
            job = resolve(layers, source)
    except SpecError as error:
        problems += error.message.splitlines()
    if problems or spec is None or job is None:
        raise SpecError("\n".join(problems))
    return Sweep(name or spec.name or _name(path), source, spec, layers, job, found)


def _read(base: Path, source: str) -> list[Layer]:
    try:
        return read_layers(base)
    except SpecError as error:
        raise SpecError("\n".join(f"{source}: base: {line}" for line in error.message.splitlines())) from None


def _together(spec: SweepSpec, found: list[Axis]) -> list[str]:
    """What does not go together in the file, beyond what its sections say themselves."""
    problems = []
    for axis in found:
        if spec.equal == "tokens" and axis.field in DECIDES:
            problems.append(
                f"array.parameters.{axis.name}: equal: tokens decides on the steps; write equal: steps, or leave it out"
            )
        if spec.array.seeds > 1 and axis.field == "train.seed":
            problems.append(f"array.parameters.{axis.name}: array.seeds has seeds of its own; take one of them")
        if spec.scheduler.copies and not axis.fixed and axis.field not in LIVE:
            problems.append(
                f"array.parameters.{axis.name}: cannot change while a cell trains, as {spec.scheduler.name} needs; it can change "
                f"{', '.join(LIVE)}"
            )
    return problems


def _name(path: Path) -> str:
    """Default sweep name: the file name, if valid."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._")[:100] or "sweep"
