"""The aggregator checks the readings that it stores, keeps those that storage refuses, and reports to the monitor."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from raydist.observe.aggregator import Aggregator
from raydist.observe.run_monitor import RunMonitor
from raydist.run.directory import SAMPLES, RunDir
from raydist.run.log import read_events
from raydist.run.telemetry_log import read_samples


def handle(monitor: RunMonitor) -> Any:
    """The monitor with the interface of an actor handle."""
    return SimpleNamespace(push=SimpleNamespace(remote=monitor.push), export=SimpleNamespace(remote=monitor.export))


def reading(at: float, rank: int, allocated: int) -> dict[str, Any]:
    return {
        "at": at, "kind": "rank", "host": "h", "node": "10.0.0.1", "rank": rank, "attempt": 1, "step": int(at),
        "allocated_bytes": allocated,
    }  # fmt: skip


def test_what_leaks_is_found(run: RunDir, tmp_path: Path) -> None:
    """A leak is reported to the monitor for the rank whose memory grows; exporters get the newest row of each rank, once."""
    monitor = RunMonitor(
        run.uri, interval_s=1e9, exporters=[{"name": "jsonl", "options": {"path": f"{tmp_path}/export"}}]
    )
    aggregator = Aggregator(run.uri, 3, handle(monitor), interval_s=1e9)
    noise = np.random.default_rng(1).integers(0, 1 << 20, (7200, 2))
    for at in range(7200):
        growth = (0, at << 16)
        aggregator.observe([reading(float(at), r, (1 << 30) + growth[r] + int(noise[at, r])) for r in (0, 1)])
        if at % 600 == 0:
            aggregator._round(hand_on=False)
    aggregator.close()
    monitor.end("finished")
    assert {event.data["rank"] for event in read_events(run) if event.kind == "finding"} == {1}
    lines = [json.loads(line) for line in (tmp_path / "export").read_text().splitlines()]
    (told,) = (line["rows"] for line in lines if line["type"] == "samples")
    assert [(row["rank"], row["at"]) for row in told] == [(0, 7199.0), (1, 7199.0)]
    assert read_samples(run, ["at"]).num_rows == 2 * 7200


def test_what_storage_refuses_is_told_once_and_kept(run: RunDir) -> None:
    """Readings that storage refuses are reported once, kept, and written once storage works again."""
    monitor = RunMonitor(run.uri, interval_s=1e9, exporters=[])
    aggregator = Aggregator(run.uri, 1, handle(monitor), interval_s=1e9)
    obstacle = Path(run.storage.path(SAMPLES))
    obstacle.write_text("in the way")
    for at in range(3):
        aggregator.observe([reading(float(at), 0, 7)])
        aggregator._round(hand_on=False)
    obstacle.unlink()
    aggregator.close()
    monitor.end("finished")
    assert [event.kind for event in read_events(run)] == ["note", "ended"]
    assert read_samples(run, ["at"])["at"].to_pylist() == [0.0, 1.0, 2.0]
