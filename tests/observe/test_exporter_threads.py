"""raydist.observe.exporter_threads: a faulty exporter affects neither the run nor the other exporters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raydist.observe import exporter_threads
from raydist.observe.exporter_threads import ExporterThreads
from raydist.observe.run_monitor import RunMonitor
from raydist.run.directory import RunDir
from raydist.run.log import read_events, read_steps
from tests.observe import strange

Rows = Callable[..., list[dict[str, Any]]]
SAMPLE = {"kind": "rank", "rank": 1, "node": "10.0.0.1", "attempt": 1, "at": 1.0}


def chosen(*classes: str) -> list[dict[str, Any]]:
    return [{"name": f"tests.observe.strange:{name}", "options": {}} for name in classes]


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    strange.SEEN.clear()
    strange.LET_GO.clear()
    strange.Raises.made = 0
    yield
    strange.LET_GO.set()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.005)


def test_everything_comes_in_order(run: RunDir, rows: Rows) -> None:
    """Attempts, steps, events and samples arrive in order, then a flush; at the end `ended`, a flush and `close`."""
    watch = RunMonitor(run.uri, interval_s=60.0, exporters=chosen("PointResult"))
    watch.begin_attempt(1, 2, 0)
    watch.push(rows(range(1, 3)), [])
    watch.observe([SAMPLE])
    watch.begin_attempt(2, 2, 1)
    watch.end("finished")
    assert strange.SEEN == [
        "attempt 1 from 0", "attempt_started", "step 1", "step 2", "sample 1", "attempt 2 from 1", "attempt_started", "flush",
        "ended", "flush", "close",
    ]  # fmt: skip


def test_one_that_raises_is_told_once_and_tried_again(run: RunDir, rows: Rows) -> None:
    """A constructor or flush that raises is tried again until it succeeds, and no step is lost; samples that the exporter refuses
    are lost, and counted in a note."""
    notes: list[str] = []
    out = ExporterThreads(run, chosen("Raises"), {}, notes.append, retry_s=0.0)
    out.steps(rows(range(1, 4)), 1.0)
    out.samples([SAMPLE] * 3)
    out.settle(20.0)  # the constructor raises
    out.settle(20.0)  # flush raises
    out.steps(rows(range(4, 5)), 2.0)
    out.settle(20.0)
    out.close(20.0)
    assert strange.SEEN[:6] == ["step 1", "step 2", "step 3", "flush", "step 4", "flush"], "nothing new before a flush"
    assert strange.Raises.made == 2
    assert notes[0] == (
        'exporter "tests.observe.strange:Raises" failed: ConnectionError: the other side is away; training continues, '
        "and it is tried again"
    )
    assert notes[1:] == ['exporter "tests.observe.strange:Raises": 3 rows did not reach it']


def test_one_that_hangs_holds_up_nobody(run: RunDir, rows: Rows) -> None:
    """Pushes, flushes, the heartbeat and the end of the run are not delayed, another exporter gets all rows; a note names the
    exporter that hangs."""
    watch = RunMonitor(run.uri, interval_s=0.01, exporters=chosen("Hangs", "PointResult"))
    hanging = watch._exporters._all[0]
    watch.push(rows(range(1, 3)), [])
    until(lambda: strange.SEEN.count("step 2") == 2)  # one of them is from the exporter that now hangs
    hanging._since -= 2 * exporter_threads.STUCK_S
    until(lambda: any("Hangs" in e.get("text", "") for e in watch.snapshot()["events"]))
    watch.push(rows(range(3, 5)), [])
    watch.end("finished")
    assert hanging._working, "it still hangs"
    assert strange.SEEN[-1] == "close"
    assert [s for s in strange.SEEN if s.startswith("step")].count("step 4") == 1
    assert read_steps(run).num_rows == 4
    texts = [e.data["text"] for e in read_events(run) if e.kind == "note"]
    assert len(texts) == 1
    assert "has not returned" in texts[0]


def test_what_waits_is_bounded(run: RunDir, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an exporter hangs, the oldest rows are dropped and counted; an attempt is kept, because it voids rows."""
    monkeypatch.setattr(exporter_threads, "BUDGET", 10)
    notes: list[str] = []
    out = ExporterThreads(run, chosen("Hangs"), {}, notes.append)
    (outlet,) = out._all
    out.steps(rows(range(1, 2)), 1.0)
    out.wake()
    until(lambda: outlet._working)
    out.attempt(2, 0, 1.0)
    for start in range(1, 101, 5):
        out.steps(rows(range(start, start + 5)), 1.0)
    assert [item.method for item in outlet._items] == ["attempt", "steps", "steps"]
    assert outlet._items[-1].args[0][-1]["step"] == 100
    strange.LET_GO.set()
    out.settle(20.0)
    assert notes == ['exporter "tests.observe.strange:Hangs": 90 rows did not reach it']


def test_a_large_event_is_not_kept(run: RunDir, rows: Rows) -> None:
    """Histograms go to the exporter, but not to events.jsonl or the live view."""
    watch = RunMonitor(run.uri, interval_s=60.0, exporters=chosen("PointResult"))
    watch.push([], [{"v": 1, "kind": "histograms", "at": 1.0, "step": 1, "weights": {}, "gradients": {}}])
    assert watch.snapshot()["events"] == []
    watch.end("finished")
    assert "histograms" in strange.SEEN
    assert [e.kind for e in read_events(run)] == ["ended"]
