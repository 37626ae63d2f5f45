"""Whether a run may continue with this spec: the fields that change its numbers must be unchanged, except for its length.

Runs anywhere: plain python, no torch. The driver checks before anything starts, each rank after it has chosen a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from raydist.checkpoint.manifest import Manifest, changed_numbers
from raydist.errors import SpecChanged
from raydist.worker.optim.schedule import lr_at, peak_lr

if TYPE_CHECKING:
    from raydist.spec import JobSpec

LENGTH = ("train.steps", "train.epochs")
"""The fields of `JobSpec.numbers` with the length of a run. Another value changes the schedule of later steps, but no sample."""


def check(run: str, found: Manifest, numbers: Mapping[str, Any], total: int, allow: bool = False) -> list[str]:
    """The fields in which the job differs from its checkpoint, a line each.

    `run`: its name; `numbers`: of the job, see `JobSpec.numbers`; `total`: optimizer steps of the whole job. Raises SpecChanged
    if others than LENGTH differ, unless `allow`; and if the job has fewer steps than are trained already.
    """
    changed = changed_numbers(found.numbers, numbers)
    if not allow and len(changed) > len(_length(changed)):
        raise SpecChanged(
            f"run {run} has trained {found.step} steps with other numbers:\n    " + "\n    ".join(changed),
            "restore the old values, or pass --allow-spec-change to continue anyway, or --fresh or another --name for a new run",
        )
    if total < found.step:
        raise SpecChanged(
            f"{' and '.join(_length(changed)) or 'train.steps'}: run {run} has trained {found.step} steps already, and the job "
            f"sets {total} in all",
            f"set {found.step} steps or more, or pass --fresh or another --name to start a new run",
        )
    return changed


def schedule_change(found: Manifest, spec: JobSpec, total: int, steps_per_epoch: int) -> str | None:
    """How another length changes the learning rate, in a line; None if the length is the same, or other fields have changed too.

    `total`: optimizer steps of the whole job; `found`: the checkpoint that it continues from, of the same data.
    """
    changed = changed_numbers(found.numbers, spec.numbers(found.numbers.get("data.fingerprint", "")))
    if not changed or len(changed) > len(_length(changed)):
        return None
    length = {name.removeprefix("train."): found.numbers.get(name) for name in LENGTH}
    before = spec.train.model_copy(update=length).total(steps_per_epoch)
    said = f"{' and '.join(_length(changed))}: the run now ends at step {total} instead of {before}"
    if not 0 < found.step < total:
        return said
    schedule, peak = spec.optim.schedule, peak_lr(spec.optim, spec.train.global_batch)
    planned = lr_at(found.step + 1, before, schedule, peak) if found.step < before else None
    now = lr_at(found.step + 1, total, schedule, peak)
    if planned == now:
        return f"{said}; the learning rate of step {found.step + 1} is as planned: {now:.3g}"
    was = lr_at(min(found.step, before), before, schedule, peak)
    return (
        f"{said}, and its {schedule.name} schedule with it: the learning rate goes from {was:.3g} at step {found.step} to "
        f"{now:.3g} at step {found.step + 1}"
    )


def _length(changed: list[str]) -> list[str]:
    return [line for line in changed if line.split(":", 1)[0] in LENGTH]
