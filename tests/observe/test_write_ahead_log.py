"""raydist.observe.write_ahead_log: what a killed monitor leaves to the next one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raydist.observe import write_ahead_log
from raydist.observe.run_monitor import RunMonitor
from raydist.observe.write_ahead_log import WriteAheadLog
from raydist.records import Event
from raydist.run.directory import RunDir
from raydist.run.log import read_events, read_steps
from raydist.run.status import this_process

Rows = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(write_ahead_log, "SHM", folder)
    return folder


def test_what_is_stored_goes(shm: Path) -> None:
    """Up to the mark, whatever comes meanwhile; a mark of a flush that another has overtaken changes nothing."""
    driver = this_process()
    one = WriteAheadLog("run", driver)
    one.add({"n": 1})
    first = one.mark()
    one.add({"n": 2})
    second = one.mark()
    one.add({"n": 3})
    one.stored(second)
    one.stored(first)
    assert one.left() == [{"n": 3}]
    one.add({"n": 4})
    one.stored(one.mark())
    assert one.left() == []
    one.add({"n": 5})
    again = WriteAheadLog("run", driver)
    assert again.left() == [{"n": 5}], "a flush leaves a file that takes more"
    again.close()
    one.close()
    assert list(shm.iterdir()) == []
    one.add({"n": 6})
    one.stored(one.mark())
    assert not [file for file in os.listdir("/proc/self/fd") if str(shm) in os.path.realpath(f"/proc/self/fd/{file}")]


def test_a_torn_line_is_none(shm: Path) -> None:
    """It had no answer: whoever told it tells it again. What follows is whole."""
    driver = this_process()
    one = WriteAheadLog("run", driver)
    one.add({"n": 1})
    (path,) = shm.iterdir()
    with path.open("ab") as file:
        file.write(b'{"n": ')
    again = WriteAheadLog("run", driver)
    assert again.left() == [{"n": 1}]
    again.add({"n": 2})
    assert WriteAheadLog("run", driver).left() == [{"n": 1}, {"n": 2}]


def test_whose_it_is(shm: Path) -> None:
    """Another run's and another driver's are left alone; one whose driver is gone is taken away."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    kept = [WriteAheadLog("run", this_process()), WriteAheadLog("other", this_process())]
    kept[0].add({"n": 1})
    gone = WriteAheadLog("run", this_process(ended.pid))
    assert len(list(shm.iterdir())) == 3
    assert WriteAheadLog("run", this_process()).left() == []
    assert kept[0].left() == [{"n": 1}]
    with pytest.raises(FileNotFoundError):
        gone.left()


def test_nothing_is_lost_or_doubled(run: RunDir, rows: Rows, shm: Path) -> None:
    """A monitor is killed, and the next one stands in: what was stored stays, what was not is stored, each once; also what is told
    again, for its answer was lost."""
    driver = this_process()
    made = [Event("eval", 5.0 + n, {"step": n, "loss": float("nan"), "best": True}).to_dict() for n in range(1, 5)]
    first = RunMonitor(run.uri, driver, interval_s=60.0)
    first.begin_attempt(1, 2, 0)
    first.push(rows(range(1, 3)), made[:1])
    first.flush()
    first.push(rows(range(3, 5)), made[1:2])
    first._log.flush()  # and is killed before it can say so
    first.push(rows(range(5, 7)), made[2:3])
    second = RunMonitor(run.uri, driver, interval_s=60.0)
    assert second.snapshot()["step"] == 6
    second.push(rows(range(5, 8)), made[2:4])
    second.end("finished")
    assert read_steps(run)["step"].to_pylist() == [1, 2, 3, 4, 5, 6, 7]
    assert read_steps(run)["attempt"].to_pylist() == [1] * 7
    events = read_events(run)
    assert [e.kind for e in events] == ["attempt_started", *["eval"] * 4, "ended"]
    assert [e.data["step"] for e in events if e.kind == "eval"] == [1, 2, 3, 4]
    assert list(shm.iterdir()) == []


def test_a_restart_that_was_not_stored(run: RunDir, rows: Rows, shm: Path) -> None:
    """The attempt that began between two flushes is known too: its rows replace those of the one before."""
    driver = this_process()
    first = RunMonitor(run.uri, driver, interval_s=60.0)
    first.begin_attempt(1, 2, 0)
    first.push(rows(range(1, 6)), [])
    first.flush()
    first.begin_attempt(2, 1, 3)
    first.push(rows(range(4, 5), attempt=2), [Event("resumed", 5.0, {"step": 3}).to_dict()])
    second = RunMonitor(run.uri, driver, interval_s=60.0)
    assert (second.snapshot()["attempt"], second.snapshot()["world_size"]) == (2, 1)
    second.push(rows(range(5, 7), attempt=2), [])
    second.end("finished")
    assert read_steps(run)["step"].to_pylist() == [1, 2, 3, 4, 5, 6]
    assert read_steps(run)["attempt"].to_pylist() == [1, 1, 1, 2, 2, 2]


def test_no_memory_costs_no_record(run: RunDir, rows: Rows, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said once, and the run goes on."""
    monkeypatch.setattr(write_ahead_log, "SHM", disk)
    watch = RunMonitor(run.uri, interval_s=60.0)
    with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))
    watch.begin_attempt(1, 2, 0)
    for n in range(1, 100):
        watch.push(rows(range(n, n + 1)), [])
    watch.end("finished")
    assert read_steps(run)["step"].to_pylist() == list(range(1, 100))
    assert [e.data["text"][:37] for e in read_events(run) if e.kind == "note"] == [
        "if this run's monitor is killed, the r"[:37]
    ]
