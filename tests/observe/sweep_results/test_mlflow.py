"""raydist.observe.sweep_results.mlflow, against a real server with SQLite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raydist.observe.exporters import Facts as RunFacts
from raydist.observe.exporters import resolve
from raydist.observe.exporters.mlflow import Exporter
from raydist.observe.sweep_results import Row, choose, of_sweep
from raydist.observe.sweep_results.mlflow import Rows
from raydist.run.sweep_directory import SweepDir

Make = Callable[..., Row]


def client_of(uri: str) -> Any:
    """Imported here: each process of the tests collects this file, and one runs it."""
    from mlflow import MlflowClient

    return MlflowClient(uri)


def exporters(uri: str, **options: Any) -> list[dict[str, Any]]:
    """The exporters of a base job: MLflow, and one that takes no rows."""
    return [{"name": "mlflow", "options": {"uri": uri, **options}}, {"name": "jsonl", "options": {}}]


def opened(folder: SweepDir, uri: str, **options: Any) -> Rows:
    (place,) = choose(exporters(uri, **options), folder)
    rows = place.open()
    assert isinstance(rows, Rows)
    return rows


def runs(uri: str, experiment: str) -> dict[str, Any]:
    """The MLflow runs of an experiment, by name."""
    client = client_of(uri)
    found = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    assert len(found) == len({run.info.run_name for run in found})
    return {run.info.run_name: run for run in found}


def test_the_run_with_the_curves_gets_the_row(folder: SweepDir, row: Make, mlflow_server: str) -> None:
    """Each cell has one MLflow run, in the sweep's experiment: the exporter's run keeps its params and gets the results; a cell
    that never trained gets a run too."""
    run = folder.run("a")
    (mine, _) = resolve(of_sweep(exporters(mlflow_server), folder), run)
    curves = Exporter(RunFacts(run, mine["options"], {"optim": {"lr": 0.001}, "model": {"layers": 4}}))
    curves.event({"kind": "eval", "at": 150.0, "step": 40, "loss": 2.25})
    curves.close()
    rows = opened(folder, mlflow_server, tags={"team": "blue"})
    rows.write(row("a"))
    rows.write(row("b", 0.01, "failed", cause="KeyError: 'x'", figures={}))
    found = runs(mlflow_server, "a_sweep")
    assert sorted(found) == ["a", "b"]
    a, b = found["a"].data, found["b"].data
    assert a.metrics == {
        "eval/loss": 2.25, "objective": 2.25, "eval_loss": 2.25, "loss": 2.5, "tokens": 5120.0, "seconds": 12.5,
    }  # fmt: skip
    assert (a.params["optim.lr"], a.params["model.layers"], a.params["parallel.strategy"]) == ("0.001", "4", "ddp")
    told = {name: a.tags[f"raydist.{name}"] for name in ("sweep", "cell", "point", "seed", "status", "run")}
    assert told == {"sweep": "a_sweep", "cell": "a", "point": "3", "seed": "17", "status": "finished", "run": run.uri}
    assert [found[name].info.status for name in "ab"] == ["FINISHED", "FAILED"]
    assert (b.metrics, b.params["optim.lr"]) == ({"seconds": 12.5}, "0.01")
    assert (b.tags["raydist.cause"], b.tags["team"]) == ("KeyError: 'x'", "blue")
    assert found["b"].info.end_time == 200_000


def test_cells_are_grouped_where_the_job_names_no_group(folder: SweepDir) -> None:
    """In MLflow by experiment, in Weights & Biases by group; other exporters are as they were."""
    asked = [
        {"name": "wandb", "options": {"project": "p"}},
        {"name": "wandb", "options": {"group": "g"}},
        {"name": "jsonl", "options": {}},
    ]
    assert [each["options"] for each in of_sweep(asked, folder)] == [
        {"project": "p", "group": "a_sweep"},
        {"group": "g"},
        {},
    ]


def test_the_next_driver_doubles_nothing(folder: SweepDir, row: Make, mlflow_server: str) -> None:
    """It knows which rows exist, and completes the row that was being written when a driver was killed: each metric has one
    point."""
    other = SweepDir(folder.uri.replace("a_sweep", "axsweep"))  # the _ in the path is a wildcard in MLflow's filter
    opened(other, mlflow_server, experiment="next").write(row("c"))
    rows = opened(folder, mlflow_server, experiment="next")
    assert not rows.has("a")
    rows.write(row("a"))
    client = client_of(mlflow_server)
    half = client.create_run(
        client.get_experiment_by_name("next").experiment_id, 1, {"raydist.run": folder.run("b").uri}, "b"
    )
    rows = opened(folder, mlflow_server, experiment="next")
    assert [rows.has(cell) for cell in "abc"] == [True, False, False]
    for _ in range(2):
        rows.write(row("b", 0.01))
    found = runs(mlflow_server, "next")
    assert sorted(found) == ["a", "b", "c"]
    assert found["b"].info.run_id == half.info.run_id
    assert [point.value for point in client.get_metric_history(half.info.run_id, "objective")] == [2.25]
    rows = opened(folder, mlflow_server, experiment="next")
    assert [rows.has(cell) for cell in "abc"] == [True, True, False]
