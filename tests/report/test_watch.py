"""`raydist watch`: the view of a live run, from its folder only."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from raydist.cli import watch as command
from raydist.errors import RunNotFound
from raydist.observe.run_monitor import RunMonitor
from raydist.records import Event, Finding, StepRecord
from raydist.report import time_breakdown, watch
from raydist.report.doctor import slow_ranks
from raydist.run.directory import SPEC, RunDir
from raydist.run.log import read_events

GIB = 1 << 30


def reading(rank: int, at: float, compute: float, exposed: float, data: float, **more: Any) -> dict[str, Any]:
    """A rank's counters, in seconds so far."""
    phases = {"forward_seconds": compute / 2, "backward_seconds": compute / 2 + exposed, "data_seconds": data}
    who = {"kind": "rank", "host": f"h{rank}", "node": f"10.0.0.{rank + 1}", "rank": rank, "attempt": 1}
    return {**who, "at": at, "step": 12, "all_reduce_exposed_seconds": exposed, "rss_bytes": 2 * GIB, **phases, **more}


def node(number: int, at: float, received: int) -> dict[str, Any]:
    """A node's reading."""
    who = {"kind": "node", "host": f"h{number}", "node": f"10.0.0.{number + 1}"}
    return {**who, "at": at, "memory_total_bytes": 8 * GIB, "nic_in_bytes": received, "nic_out_bytes": 2 * received}


@pytest.fixture
def monitor(tmp_path: Path) -> RunMonitor:
    """The monitor of a run of two ranks, of which the second computes for twice as long."""
    run = RunDir(tmp_path / "a-run")
    run.storage.write(SPEC, b"train: {steps: 200}\n")
    made = RunMonitor(run.uri, interval_s=60.0, exporters=[])
    made.begin_attempt(1, 2, 0)
    now = time.time()
    made.observe([reading(0, now - 10, 100, 50, 5), reading(1, now - 10, 150, 0, 5), node(0, now - 10, 1000)])
    made.observe([reading(0, now, 104, 55, 6), reading(1, now, 158, 1, 6), node(0, now, 6000), node(1, now, 0)])
    made._samples.flush()
    made._store_state()
    return made


def test_a_view(monitor: RunMonitor, tmp_path: Path) -> None:
    """Shares of the last seconds only, memory relative to its node's, and no rank is slow by that alone."""
    seen = watch.view(RunDir(tmp_path / "a-run"))
    assert (seen["run"], seen["status"], seen["attempt"], seen["steps"]) == ("a-run", "running", 1, 200)
    first, second = seen["ranks"]
    assert [first[name] for name in ("compute", "exposed", "data")] == pytest.approx([0.4, 0.5, 0.1])
    assert [second[name] for name in ("compute", "exposed", "data")] == pytest.approx([0.8, 0.1, 0.1])
    assert (first["memory_bytes"], first["memory_used"], first["gpu_util"]) == (2 * GIB, 0.25, None)
    assert [row["slow"] for row in seen["ranks"]] == [False, False]
    one, two = seen["nodes"]
    assert (one["nic_in_bytes_per_second"], one["nic_out_bytes_per_second"]) == pytest.approx((500, 1000))
    assert two["nic_in_bytes_per_second"] is None, "one reading makes no rate"
    assert seen["gpus"] == []
    monitor.end("finished")


def test_experts(monitor: RunMonitor, tmp_path: Path) -> None:
    """The last step's imbalance and exchanged bytes are shown for a model with experts alone; and the newest loads that were
    recorded, with a bar for each expert; of an earlier version from its event."""
    seen = watch.view(RunDir(tmp_path / "a-run"))
    assert (seen["expert_imbalance"], seen["exchanged_bytes"]) == (None, None)
    assert "imbalance" not in watch.line(seen)
    assert "exchanged" not in watch.line(seen)
    step = StepRecord(1, 3.0, 1e-3, 1.0, 10, 2.0, 0.1, 2, 1, "0" * 16)
    monitor.push([replace(step, expert_imbalance=1.25, exchanged_bytes=3 << 20).to_dict()], [])
    monitor._store_state()
    seen = watch.view(RunDir(tmp_path / "a-run"))
    assert (seen["expert_imbalance"], seen["exchanged_bytes"]) == (1.25, 3 << 20)
    assert "experts' imbalance 1.25  exchanged 3.0 MiB/step" in watch.line(seen)
    assert "last sync" not in watch.line(seen)
    assert seen["expert_loads"] is None
    layers = {"blocks.0.mlp": {"loads": [4, 0, 8, 4], "bias": [0.0] * 4}, "blocks.1.mlp": {"loads": [4, 4, 4, 4]}}
    earlier = {"step": 10, "imbalance": 2.0, "exchanged": 3 << 20, "layers": layers}
    names = Event("experts", time.time(), {"layers": {"blocks.0.mlp": 4, "blocks.1.mlp": 4}})
    known = replace(step, step=11, expert_imbalance=2.0, expert_loads=[[4, 0, 8, 4], [4, 4, 4, 4]])
    left_out = replace(step, step=12, expert_imbalance=2.0)
    for at, rows, event in ((10, [], Event("expert_loads", time.time(), earlier)), (11, [known, left_out], names)):
        monitor.push([row.to_dict() for row in rows], [event.to_dict()])
        monitor.flush()
        seen = watch.view(RunDir(tmp_path / "a-run"))
        bars = {"blocks.0.mlp": [4, 0, 8, 4], "blocks.1.mlp": [4, 4, 4, 4]}
        assert seen["expert_loads"] == {"step": at, "layers": bars}
    console = Console(file=io.StringIO(), width=140)
    console.print(watch.panel(seen))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "blocks.0.mlp  ▅·█▅  fullest 2.00 of the mean, 1 idle" in shown
    assert "blocks.1.mlp  ████  fullest 1.00 of the mean" in shown
    monitor.end("finished")


def test_outer_steps(monitor: RunMonitor, tmp_path: Path) -> None:
    """What the last one cost is shown where replicas train apart."""
    step = StepRecord(1, 3.0, 1e-3, 1.0, 10, 2.0, 0.1, 2, 1, "0" * 16, local_step=True)
    monitor.push([replace(step, sync_seconds=0.05, sync_bytes=3 << 20).to_dict()], [])
    monitor._store_state()
    assert "last sync 3.0 MiB in 50 ms" in watch.line(watch.view(RunDir(tmp_path / "a-run")))
    monitor.end("finished")


def test_what_a_rank_of_a_gpu_has(monitor: RunMonitor, tmp_path: Path) -> None:
    """The rank's memory is its GPU's."""
    now = time.time()
    gpu = {"kind": "gpu", "host": "h0", "node": "10.0.0.1", "gpu": 3, "at": now, "gpu_util": 0.9}
    monitor.observe([{**gpu, "gpu_memory_used_bytes": 20 * GIB, "gpu_memory_total_bytes": 80 * GIB}])
    monitor.observe([reading(0, now + 1, 110, 60, 7, gpu=3)])
    monitor._samples.flush()
    first = watch.view(RunDir(tmp_path / "a-run"))["ranks"][0]
    assert (first["memory_bytes"], first["memory_used"], first["gpu_util"]) == (20 * GIB, 0.25, 0.9)
    monitor.end("finished")


def test_ranks_of_an_attempt_before_are_not_shown(monitor: RunMonitor, tmp_path: Path) -> None:
    """An ended run shows no ranks or nodes either."""
    monitor.begin_attempt(2, 2, 0)
    monitor._store_state()
    assert watch.view(RunDir(tmp_path / "a-run"))["ranks"] == []
    monitor.end("finished")
    assert watch.view(RunDir(tmp_path / "a-run"))["nodes"] == []


def test_shares() -> None:
    """They add up to one; a rank with one reading has none."""
    rows = [reading(0, 0.0, 0, 0, 0), reading(0, 1.0, 2, 1, 0.5, save_seconds=0.25, eval_seconds=0.25)]
    found = time_breakdown.spent(rows)
    assert found == {"compute": 0.5, "exposed": 0.25, "data": 0.125, "eval": 0.0625, "save": 0.0625}
    assert time_breakdown.spent(rows[:1]) is None
    assert time_breakdown.spent([rows[0], rows[0]]) is None


def call(*arguments: str) -> str:
    """Stdout of the command."""
    app = typer.Typer()
    app.command()(command.watch)
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_command_ends_with_the_run(monitor: RunMonitor, tmp_path: Path) -> None:
    """For an ended run the command writes one line with the final status, or with --json one object."""
    monitor.end("finished")
    assert call("a-run", "--storage", str(tmp_path)).startswith("a-run finished  step 0/200")
    assert json.loads(call("a-run", "--storage", str(tmp_path), "--json"))["status"] == "finished"
    with pytest.raises(RunNotFound):
        call("another", "--storage", str(tmp_path))


def test_the_panel(monitor: RunMonitor, tmp_path: Path) -> None:
    """On a terminal: one row per rank, with a bar of its memory; the rank that a finding calls slow is named, until it is over."""
    run = RunDir(tmp_path / "a-run")
    told = Finding("cpu_stolen", 1, "warning", "rank 1 is slow", {}, "mend it", symptom="slow_compute", lost=0.4)
    monitor.push([], [told.event(time.time()).to_dict()])
    monitor.flush()
    assert [row["slow"] for row in watch.view(run)["ranks"]] == [False, True]
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(watch.panel(watch.view(RunDir(tmp_path / "a-run"))))
    shown = console.export_text()
    assert "██░░░░░░░░" in shown
    assert "rank 1 is slow: mend it" in shown
    assert "50%" in shown
    monitor.push([], [replace(told, state="over").event(time.time() + 1).to_dict()])
    monitor.flush()
    assert [row["slow"] for row in watch.view(run)["ranks"]] == [False, False]
    (one,) = slow_ranks(read_events(run))
    assert (one["rank"], one["rule"], one["until"] > one["at"]) == (1, "cpu_stolen", True)
    monitor.end("finished")
