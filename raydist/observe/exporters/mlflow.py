"""Exports a run to MLflow: its job as params, its steps and evaluations as metrics. Needs `raydist[mlflow]`.

Runs in: the run's monitor. A resumed run continues the same MLflow run, named in RUN/mlflow.json. MLflow cannot delete points:
a step that was trained twice has both points.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from pydantic import Field

from raydist.errors import UserError
from raydist.observe.exporters import BaseExporter, Facts, curves
from raydist.parsing import parse_json
from raydist.redact import redact
from raydist.run.directory import RunDir
from raydist.spec.parts import Part

FILE = "mlflow.json"
EXPERIMENT = "raydist"
_BATCH = 1000
"""Metrics per request, MLflow's limit. Its limits for params: 100, of 6000 characters."""
_PARAMS, LENGTH = 100, 6000
_STATUS = {"finished": "FINISHED", "stopped": "FAILED"}
IMPATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""The caller retries by itself: MLflow's default retries, for a server that is down, take minutes."""


class Options(Part):
    """Where the run is recorded in MLflow."""

    uri: str | None = Field(None, description="Tracking server or store; default: $MLFLOW_TRACKING_URI of the driver.")
    experiment: str | None = Field(None, description="Name of the experiment; default: raydist.")
    tags: dict[str, Any] | None = Field(None, description="Tags of the MLflow run: names and values.")


class Exporter(BaseExporter):
    """Options: `uri` of the tracking server or store (default: $MLFLOW_TRACKING_URI of the driver), `experiment`, `tags`."""

    def __init__(self, facts: Facts) -> None:
        for name, value in IMPATIENT.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        self._facts = facts
        self._metrics: list[Any] = []
        self._tags: dict[str, str] = {}
        self._status = "KILLED"
        self._client = MlflowClient(tracking_uri=facts.options["uri"])
        self._run_id = self._existing_run() or self._new_run()
        facts.note(f"mlflow: run {self._run_id} at {redact(facts.options['uri'])}")

    @staticmethod
    def resolve(options: Mapping[str, Any], run: RunDir) -> dict[str, Any]:
        """The options with `uri` and `experiment` set. Raises UserError if mlflow is missing, or no server is named."""
        asked = Options(**options)
        if find_spec("mlflow") is None:
            raise UserError("mlflow is not installed", 'pip install "raydist[mlflow]"')
        uri = asked.uri or os.environ.get("MLFLOW_TRACKING_URI")
        if not isinstance(uri, str):
            raise UserError(
                "no tracking server is named", "give options: {uri: http://HOST:5000}, or set MLFLOW_TRACKING_URI"
            )
        return {"uri": uri, "experiment": asked.experiment or EXPERIMENT, "tags": asked.tags or {}}

    def attempt(self, number: int, resume_step: int, at: float) -> None:
        """Sets the newest attempt and its resume step as tags."""
        self._tags |= {"raydist.attempt": str(number), "raydist.resume_step": str(resume_step)}

    def steps(self, rows: Sequence[Mapping[str, Any]], at: float) -> None:
        """The same curves as in TensorBoard, by step."""
        for row in rows:
            for name, value in curves(row).items():
                self._point(name, value, row["step"], at)

    def event(self, event: Mapping[str, Any]) -> None:
        """Evaluations, the cause of the newest failure, and the final status."""
        if event["kind"] == "eval":
            self._point("eval/loss", event["loss"], event["step"], event["at"])
        elif event["kind"] == "failure":
            self._tags["raydist.failure"] = str(event["cause"])[:LENGTH]
        elif event["kind"] == "ended":
            self._status = _STATUS.get(event["status"], "KILLED")

    def flush(self) -> None:
        """Sends the buffered data. Raises MLflow's errors, and keeps unsent data."""
        from mlflow.entities import RunTag

        while self._metrics or self._tags:
            tags = [RunTag(name, value) for name, value in self._tags.items()]
            self._client.log_batch(self._run_id, metrics=self._metrics[:_BATCH], tags=tags)
            del self._metrics[:_BATCH]
            self._tags.clear()

    def close(self) -> None:
        """The last flush, and the run's final status."""
        self.flush()
        self._client.set_terminated(self._run_id, status=self._status)

    def _point(self, name: str, value: float, step: int, at: float) -> None:
        from mlflow.entities import Metric

        if math.isfinite(value):  # tracking stores reject other values, each differently
            self._metrics.append(Metric(name, float(value), int(at * 1000), int(step)))

    def _existing_run(self) -> str | None:
        """The existing MLflow run of this run, if there is one; sets its status to RUNNING."""
        found = living(self._client, self._facts.run, self._facts.options["uri"])
        if found is not None:
            self._client.update_run(found, status="RUNNING")
        return found

    def _new_run(self) -> str:
        """A new MLflow run, with the job as its params. Recorded last: a run without params is never continued."""
        from mlflow.entities import Param

        run, options = self._facts.run, self._facts.options
        found = self._client.get_experiment_by_name(options["experiment"])
        experiment = found.experiment_id if found else self._client.create_experiment(options["experiment"])
        tags = {"raydist.run": run.uri, **{name: str(value) for name, value in options["tags"].items()}}
        started = int(time.time() * 1000)
        run_id = str(self._client.create_run(experiment, started, tags, run.name).info.run_id)
        params = [Param(name, str(value)[:LENGTH]) for name, value in self._facts.fields().items()]
        for at in range(0, len(params), _PARAMS):
            self._client.log_batch(run_id, params=params[at : at + _PARAMS])
        run.storage.write(FILE, json.dumps({"uri": redact(options["uri"]), "run_id": run_id}).encode())
        return run_id


def living(client: Any, run: RunDir, uri: str) -> str | None:
    """The MLflow run of `run` on that server; None if there is none, or if it was deleted. Raises MLflow's errors."""
    from mlflow.exceptions import MlflowException

    try:
        known = parse_json(run.storage.read(FILE))
    except FileNotFoundError:
        return None
    if known["uri"] != redact(uri):
        return None
    try:
        found = client.get_run(known["run_id"])
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return None if found.info.lifecycle_stage == "deleted" else str(known["run_id"])
