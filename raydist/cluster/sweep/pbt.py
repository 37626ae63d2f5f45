"""Population based training: a cell of the worst goes on from one of the best one's checkpoint, with values a little different.

Runs in: the driver, in the thread of Ray Tune; `adopt` in that of a cell. Imports ray.tune; never torch.

Ray Tune decides who copies whom, and which values come of it. What it would copy itself is a path: here the other cell's newest
committed checkpoint, weights, optimizer and cursor, becomes one of this cell's own run (`adopt`), as a new attempt's, before which
its own ones do not count any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import PopulationBasedTraining

from raydist.errors import CheckpointNotFound
from raydist.rundir import RunDir, begin_attempt, manifest_name, resume_attempt
from raydist.runlog import last_attempt
from raydist.spec.sweep import Axis
from raydist.spec.sweep.models import SchedulerSpec
from raydist.worker.checkpoint import manifest

_SLICES = 10
_TRIES = 3


class Population(PopulationBasedTraining):
    """Ray Tune's scheduler. `exploit(cell, source, changes)` is told, changes: field -> [before, after]; `ready(cell)`: whether a
    cell has a checkpoint that another can go on from.
    """

    def __init__(
        self,
        asked: SchedulerSpec,
        axes: Sequence[Axis],
        tokens: int,
        time_attr: str,
        ready: Callable[[str], bool],
        exploit: Callable[[str, str, Mapping[str, list[Any]]], None],
    ) -> None:
        self._axes = {axis.field: axis for axis in axes if not axis.fixed}
        self._ready, self._told = ready, exploit
        super().__init__(
            time_attr=time_attr,
            perturbation_interval=asked.every or max(1, tokens // _SLICES),
            hyperparam_mutations={field: _domain(axis) for field, axis in self._axes.items()},
            quantile_fraction=asked.quantile,
            resample_probability=asked.resample,
            perturbation_factors=asked.perturb,
            custom_explore_fn=self._inside,
            log_config=False,
        )

    def _inside(self, config: dict[str, Any]) -> dict[str, Any]:
        """Ray Tune's: no value leaves the range that the file gives."""
        for field, axis in self._axes.items():
            if axis.kind != "values":
                value = min(max(config[field], axis.low), axis.high)
                config[field] = round(value) if axis.kind == "int_uniform" else float(f"{value:.5g}")
        return config

    def _get_new_config(self, trial: Trial, trial_to_clone: Trial) -> tuple[dict[str, Any], dict[str, Any]]:
        """Ray Tune's: the other's values, perturbed; the trial stays that of its cell."""
        config, operations = super()._get_new_config(trial, trial_to_clone)
        return {**config, "cell": trial.trial_id}, operations

    def _exploit(self, tune_controller: Any, trial: Trial, trial_to_clone: Trial) -> None:
        """Ray Tune's: `trial` goes on from the other's checkpoint."""
        if not self._ready(trial_to_clone.trial_id):
            return
        before = dict(trial.config)
        super()._exploit(tune_controller, trial, trial_to_clone)
        changes = {field: [before[field], trial.config[field]] for field in self._axes}
        self._told(trial.trial_id, trial_to_clone.trial_id, changes)


def _domain(axis: Axis) -> Any:
    match axis.kind:
        case "values":
            return list(axis.values)
        case "uniform":
            return tune.uniform(axis.low, axis.high)
        case "log_uniform":
            return tune.loguniform(axis.low, axis.high)
        case "int_uniform":
            return tune.randint(int(axis.low), int(axis.high) + 1)


def adopt(source: RunDir, target: RunDir) -> int:
    """Makes the newest committed checkpoint of `source`, which may train meanwhile, the newest one of `target`, which does not.

    Returns its step. Raises CheckpointNotFound, StorageError, and CheckpointCorrupt where what has arrived is not what was read.
    """
    for _ in range(_TRIES - 1):
        with suppress(FileNotFoundError, CheckpointNotFound):  # pruned while it was read: there is a newer one
            return _adopt(source, target)
    return _adopt(source, target)


def _adopt(source: RunDir, target: RunDir) -> int:
    found = manifest.read_newest(source)
    if found is None:
        raise CheckpointNotFound(f"{source.uri}: no checkpoint to go on from", "")
    for name in found.files:
        place = manifest.path(found.step, name)
        target.storage.write(place, source.storage.read(place))
    number = max(last_attempt(target), target.lineage().newest) + 1
    begin_attempt(target, number)
    resume_attempt(target, number, 0)  # what this run has committed so far is another story
    mine = replace(found, attempt=number)
    target.storage.write(manifest.path(found.step, manifest_name(number)), mine.dumps())
    if problems := manifest.verify(target, found.step):
        raise CheckpointNotFound(f"{target.uri}: the copy of {source.uri} is damaged: {problems[0]}", "")
    return found.step
