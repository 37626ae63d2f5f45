"""Exports a sweep's trials to MLflow: one run per trial, all in the sweep's experiment. Needs `raydist[mlflow]`.

Runs in: the sweep's driver. Must not import torch or ray.

If the trial already has an MLflow run with its curves (raydist/observe/exporters/mlflow.py), the results are added to it. A trial
that never trained gets a run of its own.
"""

from __future__ import annotations

import math
import os
from typing import Any

from raydist.observe.exporters.mlflow import IMPATIENT, LENGTH, living
from raydist.observe.sweep_results import Facts, Row
from raydist.run.sweep_directory import RUNS

_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_RUN, _DONE = "raydist.run", "raydist.status"
"""Tags: the URI of the run folder, which identifies a trial's run; and the status, written last."""
_PAGE = 1000


class Rows:
    """Raises MLflow's errors."""

    def __init__(self, facts: Facts) -> None:
        for name, value in IMPATIENT.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        self._folder, self._options = facts.folder, facts.options
        self._client = MlflowClient(tracking_uri=self._options["uri"])
        name = self._options["experiment"]
        found = self._client.get_experiment_by_name(name)
        self._experiment = found.experiment_id if found else self._client.create_experiment(name)
        self._runs: dict[str, str] = {}
        """Trial -> its MLflow run, for those of earlier drivers."""
        self._known: set[str] = set()
        self._load_existing()

    def has(self, cell: str) -> bool:
        """Whether its run had a final status when this object was created."""
        return cell in self._known

    def write(self, row: Row) -> None:
        """Sets the final status; then, in one request, logs the missing params, the metrics and the tags."""
        from mlflow.entities import Metric, Param, RunTag

        run_id = self._run_of(row)
        there = self._client.get_run(run_id).data.params
        at = int(row.at * 1000)
        params = [
            Param(name, str(value)[:LENGTH])
            for name, value in row.parameters.items()
            if name not in there and value not in (None, {}, [])
        ]
        # The same timestamp for every driver: MLflow merges a point that is sent twice.
        metrics = [Metric(name, value, at, row.step) for name, value in row.values.items() if math.isfinite(value)]
        facts = {
            "raydist.sweep": self._folder.name,
            "raydist.cell": row.cell,
            "raydist.point": row.point,
            "raydist.seed": row.seed,
            _DONE: row.status,
        }
        if row.cause:
            facts["raydist.cause"] = row.cause[:LENGTH]
        self._client.set_terminated(run_id, status=_STATUS[row.status], end_time=at)
        tags = [RunTag(name, str(value)) for name, value in facts.items()]
        self._client.log_batch(run_id, metrics=metrics, params=params, tags=tags)

    def _run_of(self, row: Row) -> str:
        """The trial's MLflow run; creates one if there is none."""
        run = self._folder.run(row.cell)
        found = living(self._client, run, self._options["uri"]) or self._runs.get(row.cell)
        if found is None:
            tags: dict[str, Any] = {**self._options["tags"], _RUN: run.uri}
            made = self._client.create_run(self._experiment, int(row.started * 1000), tags, row.cell)
            found = self._runs[row.cell] = str(made.info.run_id)
        return found

    def _load_existing(self) -> None:
        """Loads the runs of earlier drivers."""
        before = f"{_place(self._folder.storage.at(RUNS).uri)}/"
        quote = '"' if "'" in before else "'"
        token: str | None = None
        while True:
            page = self._client.search_runs(
                [self._experiment],
                f"tags.`{_RUN}` LIKE {quote}{before}%{quote}",
                max_results=_PAGE,
                page_token=token,
            )
            for run in page:
                tags = run.data.tags
                place = _place(tags[_RUN])
                if place.startswith(before):  # a % or _ in the path also matches other paths
                    cell = place.removeprefix(before)
                    self._runs[cell] = run.info.run_id
                    self._known |= {cell} if _DONE in tags else set()
            token = page.token
            if not token:
                return


def _place(uri: str) -> str:
    """A URI without its query options."""
    return uri.partition("?")[0]
