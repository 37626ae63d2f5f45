"""Loads a file of faults, with errors that say how to fix it.

Runs anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from raydist import registry
from raydist.errors import SpecError
from raydist.faults.base import Fault
from raydist.faults.kinds import KINDS, ExpertImbalance, SkipCollective
from raydist.spec import JobSpec
from raydist.spec.load import read_yaml
from raydist.spec.parts import SpecValueError


def load(path: str | Path, job: JobSpec | None = None) -> tuple[Fault, ...]:
    """The faults of a YAML file, a list; checked against their job. Raises SpecError with all problems."""
    source = Path(path)
    raw = read_yaml(source, examples="docs/explanation/faults.md has an example")
    if not isinstance(raw, list):
        raise SpecError(f"{path}: holds {type(raw).__name__}, not a list; write - {{fault: kill, rank: 1, step: 7}}")
    found: list[Fault] = []
    problems: list[str] = []
    for number, item in enumerate(raw, 1):
        where = f"{path}: fault {number}"
        made, wrong = _parse(item)
        if made is not None and job is not None:
            wrong += _conflicts(made, job)
        problems += [f"{where}: {line}" for line in wrong]
        if made is not None:
            found.append(made)
    if problems:
        raise SpecError("\n".join(problems))
    return tuple(found)


def parse(raw: Iterable[Mapping[str, Any]]) -> tuple[Fault, ...]:
    """Faults from the plain dicts of `model_dump`."""
    return tuple(KINDS[item["fault"]].model_validate(item) for item in raw)


def _parse(item: Any) -> tuple[Fault | None, list[str]]:
    """The fault, or its problems, one per line."""
    if not isinstance(item, dict):
        return None, [f"{item!r} is not a fault; write {{fault: kill, rank: 1, step: 7}}"]
    name = item.get("fault")
    if name is None:
        return None, [f"fault: is missing; {registry.did_you_mean('', sorted(KINDS))}"]
    if not isinstance(name, str) or name not in KINDS:
        return None, [f"fault: unknown {name!r}; {registry.did_you_mean(str(name), sorted(KINDS))}"]
    kind = KINDS[name]
    try:
        return kind.model_validate(item), []
    except ValidationError as error:
        return None, [f"{name}: {_line(detail, kind)}" for detail in error.errors()]


def _line(detail: Any, kind: type[Fault]) -> str:
    """One problem found by pydantic, as: field: value: problem; remedy."""
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, SpecValueError):
        return f"{cause.field}: {cause.value!r} {cause.what}; {cause.remedy}"
    field, known = str(detail["loc"][0]), list(kind.model_fields)
    match detail["type"]:
        case "extra_forbidden":
            return f"{field}: unknown field; {registry.did_you_mean(field, known)}"
        case "missing":
            return f"{field}: is missing; add it: {kind.model_fields[field].description}"
        case "literal_error":
            choices = [c.strip().strip("'\"") for c in detail["ctx"]["expected"].replace(" or ", ", ").split(",")]
            return f"{field}: unknown {detail['input']!r}; {registry.did_you_mean(str(detail['input']), choices)}"
    message = detail["msg"][0].lower() + detail["msg"][1:]
    return f"{field}: {detail['input']!r}: {message}; `raydist faults` lists the allowed values"


def _conflicts(fault: Fault, job: JobSpec) -> list[str]:
    """Problems of a fault that cannot happen in this job."""
    found, workers, steps = [], job.cluster.most, job.train.steps
    if fault.rank is not None and fault.rank >= workers:
        ranks = f"ranks 0 to {workers - 1}" if workers > 1 else "rank 0 alone"
        found.append(
            f"{fault.fault}: rank: {fault.rank}: the job has {ranks}; give one of them, or raise cluster.workers"
        )
    if steps is not None and fault.step > steps:
        found.append(f"{fault.fault}: step: {fault.step}: the job ends after step {steps}; give an earlier one")
    if isinstance(fault, SkipCollective) and workers == 1:
        found.append(f"{fault.fault}: rank: {fault.rank}: no other rank waits for it; raise cluster.workers")
    if isinstance(fault, ExpertImbalance) and registry.described("model", job.model.name, "experts") is None:
        remedy = "remove it, or use a model with experts (docs/reference/models.md)"
        found.append(f"{fault.fault}: the model {job.model.name} has no experts; {remedy}")
    return found
