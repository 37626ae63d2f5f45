"""A sweep in its folder: written before its first cell starts, and read when it is reported or resumed.

Runs anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from raydist.errors import SpecError, StorageError
from raydist.parsing import parse_yaml
from raydist.redact import redact
from raydist.run.sweep_directory import BASE, SWEEP, CellNote, SweepDir
from raydist.spec.load import read_stored as read_job
from raydist.spec.load import stored
from raydist.spec.models import JobSpec
from raydist.spec.sweep.cells import Cell, Sweep
from raydist.spec.sweep.models import SweepSpec


def note(cell: Cell) -> CellNote:
    """A valid cell as the folder has it."""
    job = cell.job
    return CellNote(
        cell.index, cell.id, cell.point, dict(cell.parameters), cell.seed, job.train.steps, cell.tokens, job.cluster.most,
        dict(cell.adjusted), cell.notes,
    )  # fmt: skip


def store(folder: SweepDir, sweep: Sweep, cells: Sequence[Cell]) -> None:
    """Writes what the sweep is, or what has become of it: cells may come and go between two starts.

    Raises SpecError where cells of the same id would train otherwise than those that are there; StorageError.
    """
    if folder.exists():
        spec, base = read_stored(folder)
        if changed := _changed(spec, base, sweep):
            raise SpecError(
                f"{sweep.source}: sweep {sweep.name} in {folder.uri} was started otherwise:\n" + "\n".join(changed),
                "continue it unchanged, or give it another name to start a new sweep",
            )
    data = sweep.spec.model_dump(mode="json", exclude_defaults=True) | {"name": sweep.name, "base": BASE}
    text = redact(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))
    folder.write(text, stored(sweep.base), map(note, cells))


def read_stored(folder: SweepDir) -> tuple[SweepSpec, JobSpec]:
    """What a folder's sweep is, and its base. Raises StorageError where either is damaged."""
    try:
        spec = SweepSpec.model_validate(parse_yaml(folder.storage.read(SWEEP)))
        return spec, read_job(folder.storage, BASE)
    except (ValueError, FileNotFoundError, yaml.YAMLError) as error:
        raise StorageError(
            f"{folder.uri}: {SWEEP} or {BASE} is damaged: {error}", "start the sweep under another name"
        ) from error


def _changed(spec: SweepSpec, base: JobSpec, sweep: Sweep) -> list[str]:
    """Fields, besides those in its id, that distinguish a cell."""
    before, now = _compared(spec, base), _compared(sweep.spec, sweep.base)
    return [
        f"{name}: {before.get(name)!r} then, {now.get(name)!r} now"
        for name in before | now
        if before.get(name) != now.get(name)
    ]


def _compared(spec: SweepSpec, base: JobSpec) -> dict[str, Any]:
    # Evaluation leaves a cell's weights alone, but not what it is compared by.
    return {"equal": spec.equal, **base.numbers(""), "eval.batches": base.eval.batches}
