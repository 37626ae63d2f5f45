"""A sweep's cells in MLflow: a run a cell, all in the sweep's experiment. Needs `raydist[mlflow]`.

Runs in: the sweep's driver. Must not import torch or ray.

The MLflow run of a cell is the one that has its curves already (raydist/observe/exporters/mlflow.py), if there is one: it gets
what the cell has come to. A cell that never trained gets a run of its own.
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
"""Tags: a run folder's URI, by which a run is known to be that of a cell; and the last that is written of a row."""
_PAGE = 1000


class Rows:
    """Raises what MLflow does."""

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
        """Cell -> its MLflow run, of those that were there before."""
        self._known: set[str] = set()
        self._look()

    def has(self, cell: str) -> bool:
        """Whether its run said how it ended when the place was opened."""
        return cell in self._known

    def write(self, row: Row) -> None:
        """Its end; then in one request what was set, unless it is there, what came of it, and tags."""
        from mlflow.entities import Metric, Param, RunTag

        run_id = self._of(row)
        there = self._client.get_run(run_id).data.params
        at = int(row.at * 1000)
        params = [
            Param(name, str(value)[:LENGTH])
            for name, value in row.parameters.items()
            if name not in there and value not in (None, {}, [])
        ]
        # The same time whoever writes it: a point that comes twice is one.
        metrics = [Metric(name, value, at, row.step) for name, value in row.values.items() if math.isfinite(value)]
        told = {
            "raydist.sweep": self._folder.name,
            "raydist.cell": row.cell,
            "raydist.point": row.point,
            "raydist.seed": row.seed,
            _DONE: row.status,
        }
        if row.cause:
            told["raydist.cause"] = row.cause[:LENGTH]
        self._client.set_terminated(run_id, status=_STATUS[row.status], end_time=at)
        tags = [RunTag(name, str(value)) for name, value in told.items()]
        self._client.log_batch(run_id, metrics=metrics, params=params, tags=tags)

    def _of(self, row: Row) -> str:
        """The MLflow run of a cell; a new one where it has none."""
        run = self._folder.run(row.cell)
        found = living(self._client, run, self._options["uri"]) or self._runs.get(row.cell)
        if found is None:
            tags: dict[str, Any] = {**self._options["tags"], _RUN: run.uri}
            made = self._client.create_run(self._experiment, int(row.started * 1000), tags, row.cell)
            found = self._runs[row.cell] = str(made.info.run_id)
        return found

    def _look(self) -> None:
        """What earlier drivers have brought there."""
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
                if place.startswith(before):  # a % or _ in the path fits others too
                    cell = place.removeprefix(before)
                    self._runs[cell] = run.info.run_id
                    self._known |= {cell} if _DONE in tags else set()
            token = page.token
            if not token:
                return


def _place(uri: str) -> str:
    """A URI without its options."""
    return uri.partition("?")[0]
