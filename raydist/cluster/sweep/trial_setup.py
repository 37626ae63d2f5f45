"""Prepares trials for training: their data, how many workers each has, and how many train at once.

Runs in: the driver, once it is connected to Ray. Never imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from raydist.checkpoint import hub
from raydist.checkpoint.source import pinned
from raydist.cluster import preflight
from raydist.cluster.run.request import Request
from raydist.cluster.session import Session
from raydist.cluster.sweep.capacity import Shape, asked, at_once, different, room
from raydist.cluster.sweep.trial import Plan
from raydist.data import open_or_prepare
from raydist.data.dataset import TokenDataset
from raydist.data.prepare import Progress
from raydist.data.samples import batches_of, training_samples
from raydist.observe.exporters import resolve
from raydist.observe.sweep_results import of_sweep
from raydist.run.sweep_directory import SweepDir
from raydist.spec import JobSpec, parse
from raydist.spec.load import merge, nest
from raydist.spec.sweep import Cell


class Datasets:
    """The datasets of the trials: each is opened once, and prepared if necessary. `home`: the folder for prepared ones.

    `progress`: shows the progress of a preparation, see raydist/report/preparing.py.
    """

    def __init__(self, home: str, progress: Callable[[], AbstractContextManager[Callable[[Progress], None]]]) -> None:
        self.home, self._progress = home, progress
        self._open: dict[str, TokenDataset] = {}

    def of(self, job: JobSpec) -> TokenDataset:
        """The job's dataset. Raises DataError."""
        key = job.data.model_dump_json()
        if key not in self._open:
            with self._progress() as report:
                uri = open_or_prepare(job.data, self.home, report)
            self._open[key] = TokenDataset(uri)
        return self._open[key]

    def steps(self, job: JobSpec) -> int:
        """Optimizer steps of the whole job."""
        if job.train.steps is not None:
            return job.train.steps
        dataset = self.of(job)
        return job.train.total(batches_of(job, training_samples(job, dataset), dataset.fingerprint).steps_per_epoch)


class TrialSetup:
    """Call it with a trial's id and changed values for its `Plan`. `at_once`: trials at a time; `tokens`: of the longest trial.

    The constructor raises PreflightError if the cluster cannot run one of the trials.
    """

    def __init__(
        self, trials: Sequence[Cell], folder: SweepDir, datasets: Datasets, session: Session, concurrent: int | None
    ) -> None:
        self._folder, self._datasets, self._session = folder, datasets, session
        self._trials = {trial.id: trial for trial in trials}
        self._nodes = preflight.answering(session)
        self._shapes = different(self._asked(trial.job) for trial in trials)
        self.at_once = at_once(self._nodes, self._shapes, concurrent)
        checked: dict[str, JobSpec] = {}
        for trial in trials:
            checked.setdefault(_looked_at(trial.job), trial.job)
        for job in checked.values():
            pinned(job, folder.run("none"), datasets.home)
            preflight.check(self._fitted(job), session, folder.full_uri, datasets.of(job).storage.full_uri)
        self.tokens = max(self._tokens(trial.job) for trial in trials)

    def add(self, trial: Cell) -> None:
        """Adds a trial that a search has chosen. It is not checked: it lies between trials that were."""
        self._trials[trial.id] = trial

    def __call__(self, trial: str, changes: Mapping[str, Any]) -> Plan:
        """The trial of that id, with changed values: dotted field -> value. Its run may resume with them."""
        job, run = self._fitted(self._trials[trial].job), self._folder.run(trial)
        if changes:
            raw = job.model_dump(mode="json")
            for field, value in changes.items():
                raw = merge(raw, nest(field, value))
            job = parse(raw, source=trial)
        job = pinned(job, run, self._datasets.home)
        exporters = resolve(of_sweep([e.model_dump() for e in job.observe.exporters], self._folder), run)
        dataset, gpus = self._datasets.of(job).storage.full_uri, self._gpus(job)
        request = Request(job, run, dataset, gpus, allow_spec_change=bool(changes), exporters=exporters)
        return Plan(trial, request, self._datasets.steps(job))

    def room(self) -> int:
        """How many trials fit on the cluster now: fewer than `at_once` if nodes were lost."""
        return room(preflight.answering(self._session), self._shapes)

    def _tokens(self, job: JobSpec) -> int:
        return self._datasets.steps(job) * job.train.global_batch * job.model.context

    def _gpus(self, job: JobSpec) -> float:
        return preflight.gpus_per_worker(job, self._session.resources)

    def _asked(self, job: JobSpec) -> Shape:
        return asked(job, self._gpus(job), self._nodes)

    def _fitted(self, job: JobSpec) -> JobSpec:
        """The job with a fixed number of workers, and no spares: a trial that grows would take another's workers."""
        fixed = job.with_fields({"cluster.workers": self._asked(job).workers, "cluster.spares": 0})
        return hub.local(fixed, self._datasets.home)


def _looked_at(job: JobSpec) -> str:
    """Key of all settings that a preflight checks except resources: one check is enough for jobs with equal keys."""
    settings: Mapping[str, Any] = {
        "data": job.data.model_dump(mode="json"),
        "model": [job.model.name, preflight.weights_of(job)],
        "strategy": job.parallel.strategy,
        "offload": job.offload.path,
        "snapshots": job.snapshot_every,
    }
    return json.dumps(settings, sort_keys=True)
