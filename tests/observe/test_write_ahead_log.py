"""raydist.observe.write_ahead_log: what the next monitor reads after a monitor was killed."""

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
from raydist.run.driver_process import this_process
from raydist.run.log import read_events, read_steps

Rows = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(write_ahead_log, "SHM", folder)
    return folder


def test_what_is_stored_goes(shm: Path) -> None:
    """`stored(mark)` removes the entries up to the mark and keeps later ones; an older mark, of a slower flush, changes
    nothing."""
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
    """An incomplete line is ignored: its push had no answer, so it is pushed again. The next entry is on a line of its own."""
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
    """Logs of other runs and other drivers are not touched; a log whose driver has exited is deleted."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    kept = [WriteAheadLog("run", this_process()), WriteAheadLog("other", this_process())]
    kept[0].add({"n": 1})
    gone = WriteAheadLog("run", this_process(ended.pid))
    names = set(shm.iterdir())
    assert len(list(shm.iterdir())) == 3
    assert WriteAheadLog("run", this_process()).left() == []
    assert kept[0].left() == [{"n": 1}]
    (deleted,) = names - set(shm.iterdir())
    assert gone._path == deleted


def test_nothing_is_lost_or_doubled(run: RunDir, rows: Rows, shm: Path) -> None:
    """After a monitor is killed, the next one stores what was not stored yet, each row and event once, also those that are pushed
    again because their answer was lost."""
    driver = this_process()
    made = [Event("eval", 5.0 + n, {"step": n, "loss": float("nan"), "best": True}).to_dict() for n in range(1, 5)]
    first = RunMonitor(run.uri, driver, interval_s=60.0)
    first.begin_attempt(1, 2, 0)
    first.push(rows(range(1, 3)), made[:1])
    first.flush()
    first.push(rows(range(3, 5)), made[1:2])
    first._log.flush()  # killed before it can mark them as stored
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
    """An attempt that began after the last flush is known: its rows replace those of the attempt before."""
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
    """If /dev/shm is full, one note says so, and the run continues."""
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
