"""`raydist profile`: figures over a period, and the verdicts on them."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from raydist.cli import profile as command
from raydist.errors import UsageError
from raydist.observe.run_monitor import RunMonitor
from raydist.report.profile import DEFAULT, METRICS, chosen, measured
from raydist.run.directory import SPEC, RunDir
from raydist.run.telemetry_schema import COLUMNS

DOCS = Path(__file__).parents[2] / "docs/reference/thresholds.md"


def rank(at: float, **values: Any) -> dict[str, Any]:
    """A row of rank 0."""
    return {"at": at, "kind": "rank", "host": "h", "node": "10.0.0.1", "rank": 0, "attempt": 1, **values}


def node(at: float, **values: Any) -> dict[str, Any]:
    """A row of its node."""
    return {"at": at, "kind": "node", "host": "h", "node": "10.0.0.1", **values}


def gpu(at: float, index: int, **values: Any) -> dict[str, Any]:
    """A row of one of its GPUs."""
    return {"at": at, "kind": "gpu", "host": "h", "node": "10.0.0.1", "gpu": index, **values}


def only(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The only figure of that metric, in intervals of 10 s from 100 s on."""
    (found,) = measured(sorted(rows, key=lambda r: r["at"]), [name], 100.0, 10.0)
    return found


def test_counters_count_over_the_edges_of_intervals() -> None:
    """An increase between the last row of one interval and the first row of the next belongs to the next interval."""
    rows = [node(100.0 + s, nic_in_bytes=1000 * s if s < 10 else 10_000 + 3000 * (s - 10)) for s in range(0, 20, 2)]
    found = only(rows, "network_in")
    assert (found["least"], found["most"], found["ok"]) == (pytest.approx(1000), pytest.approx(2600), None)
    assert found["mean"] == pytest.approx((1000 + 2600) / 2)


@pytest.mark.parametrize(
    ("rows", "name", "mean", "ok"),
    [
        ([gpu(101, 0, gpu_util=0.9), gpu(111, 0, gpu_util=0.82)], "gpu_util", 0.86, True),
        ([gpu(101, 0, gpu_util=0.9), gpu(111, 0, gpu_util=0.7)], "gpu_util", 0.8, False),
        ([gpu(101, 0, gpu_memory_used_bytes=97, gpu_memory_total_bytes=100)], "gpu_memory", 0.97, False),
        ([node(101, memory_used_bytes=50, memory_total_bytes=100)], "memory", 0.5, True),
        ([rank(101), rank(109, data_seconds=0.2, forward_seconds=4)], "data", 0.2 / 4.2, True),
        ([rank(101), rank(109, data_seconds=1, forward_seconds=4)], "data", 0.2, False),
        ([rank(101), rank(109, save_seconds=1, forward_seconds=4)], "save", 0.2, False),
        ([rank(101), rank(109, forward_seconds=4, all_reduce_exposed_seconds=1)], "exposed", 0.25, False),
        ([rank(101), rank(109, forward_seconds=4, all_reduce_exposed_seconds=1)], "compute", 0.75, None),
        ([rank(101), rank(109, forward_seconds=4, all_reduce_seconds=1)], "sync", 0.25, False),
        ([rank(101), rank(109, forward_seconds=4, all_reduce_seconds=0.4)], "sync", 0.1, True),
        (
            [node(t, nic_in_bytes=90 * t, nic_out_bytes=0, nic_limit_bytes_per_second=100.0) for t in (101, 109)],
            "network", 0.9, False,
        ),
    ],
)  # fmt: skip
def test_verdicts(rows: list[dict[str, Any]], name: str, mean: float, ok: bool | None) -> None:
    """Figures are compared with the thresholds of docs/reference/thresholds.md; only a bad one has a remedy."""
    found = only(rows, name)
    assert found["mean"] == pytest.approx(mean)
    assert found["ok"] is ok
    assert bool(found["remedy"]) == (ok is False)


def test_each_subject_has_its_own() -> None:
    """Two GPUs have a figure each; a metric without rows is left out."""
    rows = [gpu(101, index, gpu_util=0.5 + index / 10) for index in (0, 1)]
    found = measured(rows, ["gpu_util", "gpu_power", "network_in"], 100.0, 10.0)
    assert [(f["gpu"], f["mean"]) for f in found] == [(0, 0.5), (1, pytest.approx(0.6))]


def test_an_unknown_metric_is_refused() -> None:
    """The hint has the most similar name."""
    with pytest.raises(UsageError) as refused:
        chosen(["gpu_util", "netwrk_in"])
    assert "unknown metric 'netwrk_in'" in refused.value.message
    assert "network_in" in refused.value.hint
    assert set(chosen(None)) == set(DEFAULT)


def test_every_metric_is_documented() -> None:
    """Every metric is in docs/reference/thresholds.md, with a star if it is measured by default."""
    text = DOCS.read_text()
    for name in METRICS:
        (line,) = [line for line in text.splitlines() if line.startswith("| `") and f"`{name}`" in line.split("|")[1]]
        assert ("*" in line.split("|")[1]) == (name in DEFAULT), name


def call(*arguments: str) -> str:
    """Stdout of the command."""
    app = typer.Typer()
    app.command()(command.profile)
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_command(tmp_path: Path) -> None:
    """For a running run it prints the figures of that period; for an ended run it is refused."""
    run = RunDir(tmp_path / "a-run")
    run.storage.write(SPEC, b"train: {steps: 200}\n")
    monitor = RunMonitor(run.uri, interval_s=0.05, exporters=[])
    monitor.begin_attempt(1, 1, 0)
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            now = time.time()
            monitor.observe([rank(now, data_seconds=0.2 * now, forward_seconds=0.8 * now), gpu(now, 0, gpu_util=0.5)])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        asked = ("a-run", "--storage", str(tmp_path), "--duration", "1", "--interval", "0.3")
        found = json.loads(call(*asked, "--metric", "data,gpu_util", "--json"))
        assert [(f["metric"], f["ok"]) for f in found] == [("data", False), ("gpu_util", False)]
        assert found[0]["mean"] == pytest.approx(0.2, abs=0.001)
        assert found[0].keys() >= {"rank", "host", "unit", "least", "most", "wanted", "remedy"}
        shown = call(*asked, "--metric", "data,network_in")
        assert "LOOK" in shown
        assert "raise data.prefetch" in shown
        assert "no data for: network_in" in shown
    finally:
        ended.set()
        watcher.join()
    monitor.end("finished")
    with pytest.raises(UsageError, match="this run is finished; only a run that is training can be profiled"):
        call(*asked)


def test_metrics_take_columns_that_there_are() -> None:
    """A row with every column gives every metric."""

    def full(at: float, **who: Any) -> dict[str, Any]:
        return {
            **dict.fromkeys(COLUMNS, 10.0 * at),
            "host": "h",
            "node": "n",
            "rank": 0,
            "attempt": 1,
            "gpu": 0,
            "at": at,
            **who,
        }

    rows = [full(at, kind=kind) for at in (101.0, 109.0) for kind in ("rank", "node", "gpu")]
    assert {f["metric"] for f in measured(rows, list(METRICS), 100.0, 10.0)} == set(METRICS)
