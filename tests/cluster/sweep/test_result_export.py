"""raydist.cluster.sweep.result_export: each ended trial gets one row, once, whichever exporters fail and whichever driver
runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raydist.cluster.sweep.result_export import ResultExport
from raydist.observe.sweep_results import Row
from raydist.records import Event
from raydist.run.sweep_directory import CellNote, SweepDir, SweepLog

NOTES = [CellNote(i, name, i, {"optim.lr": 10.0**-i}, 17) for i, name in enumerate("abcd")]


class Place:
    """An exporter's rows in memory. `refuse`: raised while it is set; `bad`: trials whose row cannot be written; `gate`: `write`
    waits for it."""

    exporter = "here"

    def __init__(self) -> None:
        self.written: dict[str, Row] = {}
        self.writes: list[str] = []
        self.refuse: Exception | None = None
        self.bad: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.refused = threading.Event()

    def open(self) -> Place:
        if self.refuse is not None:
            self.refused.set()
            raise self.refuse
        return self

    def has(self, cell: str) -> bool:
        return cell in self.written

    def write(self, row: Row) -> None:
        assert self.gate.wait(240)
        if row.cell in self.bad:
            raise ValueError("no such row\nand more")
        self.writes.append(row.cell)
        self.written[row.cell] = row


@pytest.fixture
def book(tmp_path: Path) -> Callable[..., tuple[ResultExport, SweepLog, list[str]]]:
    """Makes the export of a sweep with four trials, its log, and a list of the messages of the export."""
    folder = SweepDir(tmp_path / "s")
    folder.write("", "", NOTES)

    def make(*places: Place, retry_s: float = 0.0) -> tuple[ResultExport, SweepLog, list[str]]:
        told: list[str] = []
        made = ResultExport(folder, places, "loss", retry_s, told.append)
        events = folder.events()
        made.begin(folder.cells(events), events)
        return made, SweepLog(folder, made.add), told

    return make


def finish(log: SweepLog, cell: str, kind: str = "finished", **data: Any) -> None:
    log.event("started", cell, workers=1, gpus=0.0)
    log.event("report", cell, tokens=1, step=1, value=4.0)
    log.event(kind, cell, figures={"steps": 5, "tokens": 640, "loss": 2.5}, **data)
    log.flush()


def test_what_stands_in_a_row(book: Any) -> None:
    """Rows have the parameters, status and cause of trials that have ended for good, and the seconds of all their stretches.
    Other trials have no row."""
    place = Place()
    made, log, told = book(place)
    log.event("queued", "a")
    finish(log, "a", "failed", cause="KeyError", final=False)
    finish(log, "a")
    finish(log, "b", "failed", cause="KeyError", final=True)
    finish(log, "c", "paused", because="interrupted")
    log.event("began", driver="h", cells=4)
    log.event("failed", "d", cause="no such model", final=True)
    made.close()
    assert told == []
    assert {cell: (row.status, row.cause) for cell, row in place.written.items()} == {
        "a": ("finished", None),
        "b": ("failed", "KeyError"),
        "d": ("failed", "no such model"),
    }
    row = place.written["a"]
    assert (row.parameters, row.seed, row.step, row.values["objective"]) == ({"optim.lr": 1.0}, 17, 5, 2.5)
    assert 0.0 < row.seconds <= row.at - row.started
    assert place.written["d"].values == {"seconds": 0.0}


def test_a_cell_that_a_search_adds(book: Any) -> None:
    """A trial that a search adds gets a row like the others."""
    place = Place()
    made, log, _ = book(place)
    log.event("added", note=CellNote(4, "e", 4, {"optim.lr": 7.0}, 17).to_dict())
    finish(log, "e")
    made.close()
    assert place.written["e"].parameters == {"optim.lr": 7.0}


def test_the_next_driver_writes_what_is_missing(book: Any) -> None:
    """Rows that the first driver did not write are the same as if it had; existing rows are not written again."""
    place, other = Place(), Place()
    first, log, _ = book(place)
    finish(log, "a")
    first.close()
    _, log, _ = book()  # a driver without exporters
    finish(log, "b", "stopped", because="asha")
    second, _, _ = book(place, other)
    second.close()
    assert place.writes == ["a", "b"]
    assert other.written == place.written


def test_a_place_that_refuses_costs_nobody_anything(book: Any) -> None:
    """Its rows wait until it accepts them; the other exporter gets them in the meantime."""
    away, there = Place(), Place()
    away.refuse = ConnectionError("refused")
    made, log, told = book(away, there)
    finish(log, "a")
    assert away.refused.wait(240)
    away.refuse = None
    finish(log, "b")
    made.close()
    assert (sorted(away.written), sorted(there.written), told) == (["a", "b"], ["a", "b"], [])


def test_what_is_missing_is_told_once(book: Any) -> None:
    """One row that cannot be written does not delay the others; one message at the end reports it."""
    place = Place()
    place.bad = {"a", "c"}
    made, log, told = book(place, retry_s=3600.0)
    for cell in "abcd":
        finish(log, cell)
    made.close()
    assert sorted(place.written) == ["b", "d"]
    assert told == ["rows for here: 2 trials have none (ValueError: no such row); the same command writes them"]


def test_a_place_that_hangs_is_not_waited_for(book: Any) -> None:
    """`close` returns after its timeout, and reports the missing row."""
    place = Place()
    place.gate.clear()
    made, log, told = book(place)
    finish(log, "a")
    made.close(timeout_s=0.1)
    assert told == ["rows for here: 1 trial has none (it does not answer); the same command writes them"]
    place.gate.set()


def test_no_place_no_thread(book: Any) -> None:
    """A sweep whose job has no such exporter starts no thread."""
    before = {*threading.enumerate()}
    made, log, _ = book()
    finish(log, "a")
    assert before.issuperset(threading.enumerate())  # one of another test may end meanwhile
    made.add(Event("finished", 1.0, {"cell": "b"}))
    made.close()
