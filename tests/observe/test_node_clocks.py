"""The rows of a node whose clock is wrong have the times of the run's monitor, as far as those that are right."""

from __future__ import annotations

import time

import pytest

from raydist.observe.node_clocks import WRONG_S
from raydist.observe.run_monitor import RunMonitor
from raydist.records import Event
from raydist.run.directory import RunDir
from raydist.run.log import read_events
from raydist.run.telemetry_log import read_samples


@pytest.mark.parametrize("off", [-3600.0, 3600.0])
def test_a_clock_that_is_wrong_and_is_set(run: RunDir, off: float) -> None:
    """Two nodes: the clock of one jumps an hour, either way, and back. Every row and every event of a rank has the monitor's time;
    of one message all are moved alike; a clock that differs by less than a minute is left as it is."""
    monitor, now = RunMonitor(run.uri, interval_s=1e9, exporters=[]), time.time()
    for node, ahead in (("10.0.0.1", 0.0), ("10.0.0.2", 0.0), ("10.0.0.2", off), ("10.0.0.2", 0.0), ("10.0.0.3", 30.0)):
        own = time.time() + ahead
        who = {"kind": "node", "host": node, "node": node}
        monitor.observe([{**who, "at": own - 5}, {**who, "at": own}], own)
        monitor.push([], [Event("note", own - 5, {"text": node}).to_dict()], own, node)
    monitor.end("finished")
    times = read_samples(run, ["at", "node"]).to_pylist()
    events = [{"at": event.at, "node": event.data["text"]} for event in read_events(run) if event.kind == "note"]
    assert (len(times), len(events)) == (10, 5)
    for row in [*times, *events]:
        there = row["at"] - (30 if row["node"] == "10.0.0.3" else 0)
        assert now - 6 < there < time.time() + 1 < now + WRONG_S
