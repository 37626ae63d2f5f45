"""raydist.observe.exporters.mlflow, against a real server with SQLite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from raydist.errors import UserError
from raydist.observe.exporters import Facts
from raydist.observe.exporters.mlflow import Exporter
from raydist.run.directory import RunDir

Rows = Callable[..., list[dict[str, Any]]]
SPEC = {"model": {"name": "gpt", "layers": 4, "hidden": None}, "train": {"steps": 20}, "name": "x" * 7000}


def client_of(uri: str) -> Any:
    """Imported here: each process of the tests collects this file, and one runs it."""
    from mlflow import MlflowClient

    return MlflowClient(uri)


def made(run: RunDir, uri: str, notes: list[str] | None = None, **options: Any) -> Exporter:
    note = (notes if notes is not None else []).append
    return Exporter(Facts(run, Exporter.resolve({"uri": uri, **options}, run), SPEC, note))


def test_a_run_and_its_resumption_are_one(run: RunDir, rows: Rows, mlflow_server: str) -> None:
    """Two drivers write to one MLflow run: params once, metrics by step, the tags of the newest attempt and the last status."""
    notes: list[str] = []
    first = made(run, mlflow_server, notes, experiment="ours", tags={"team": "blue"})
    first.attempt(1, 0, 1.0)
    first.steps(rows(range(1, 3)), 1.0)
    first.event({"kind": "eval", "at": 2.0, "step": 2, "loss": 0.25})
    first.event({"kind": "failure", "at": 3.0, "cause": "WorkerDied: process 7"})
    first.event({"kind": "ended", "at": 4.0, "status": "stopped"})
    first.close()
    client = client_of(mlflow_server)
    experiment = client.get_experiment_by_name("ours")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == (run.name, "FAILED")
    assert found.data.params["model.layers"] == "4"
    assert "model.hidden" not in found.data.params, "what is not set is no param"
    assert len(found.data.params["name"]) == 6000
    assert found.data.tags["raydist.failure"] == "WorkerDied: process 7"
    assert found.data.tags["team"] == "blue"

    second = made(run, mlflow_server, notes, experiment="ours")
    second.attempt(2, 1, 5.0)
    second.steps(rows(range(2, 1203), 2), 5.0)  # more than fit in one request
    second.event({"kind": "ended", "at": 9.0, "status": "finished"})
    second.close()
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert (found.data.tags["raydist.attempt"], found.data.tags["raydist.resume_step"]) == ("2", "1")
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert sorted(point.step for point in history) == sorted([1, 2, *range(2, 1203)])
    assert [(p.step, p.value) for p in client.get_metric_history(found.info.run_id, "eval/loss")] == [(2, 0.25)]
    assert notes == [f"mlflow: run {found.info.run_id} at {mlflow_server}"] * 2


def test_one_that_was_deleted_there_begins_anew(run: RunDir, rows: Rows, mlflow_server: str) -> None:
    """A run that was deleted in MLflow gets no more data: one new run is created."""
    first = made(run, mlflow_server, experiment="trash")
    first.close()
    client = client_of(mlflow_server)
    experiment = client.get_experiment_by_name("trash").experiment_id
    client.delete_run(client.search_runs([experiment])[0].info.run_id)
    for _ in range(2):
        again = made(run, mlflow_server, experiment="trash")
        again.steps(rows(range(1, 2)), 1.0)
        again.close()
    (found,) = client.search_runs([experiment])
    assert found.data.metrics["train/loss"] == 1.0


def test_a_server_that_is_away_keeps_what_it_was_to_get(run: RunDir, rows: Rows, mlflow_server: str) -> None:
    """A flush that the server refuses raises and keeps the data; the next flush sends it, once."""
    out = made(run, mlflow_server, experiment="away")
    there = out._client
    out._client = client_of("http://127.0.0.1:9")  # no server listens there
    out.attempt(1, 0, 1.0)
    out.steps(rows(range(1, 4)), 1.0)
    with pytest.raises(Exception, match="refused|127.0.0.1"):
        out.flush()
    out._client = there
    out.close()
    assert [point.step for point in there.get_metric_history(out._run_id, "train/lr")] == [1, 2, 3]


def test_no_server_is_named(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a tracking server `resolve` raises before the run starts, and the hint names `uri`; MLFLOW_TRACKING_URI is used if
    set."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UserError, match="no tracking server") as caught:
        Exporter.resolve({}, run)
    assert "uri" in caught.value.hint
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://h:5000")
    assert Exporter.resolve({}, run)["uri"] == "http://h:5000"
