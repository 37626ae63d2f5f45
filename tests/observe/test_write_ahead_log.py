"""raydist.observe.write_ahead_log: what the next monitor reads after a monitor was killed."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
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
from tests.observe.test_run_monitor import until

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
    """Logs of other runs and other drivers are not touched; a log whose driver has exited is deleted after an hour."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    kept = [WriteAheadLog("run", this_process()), WriteAheadLog("other", this_process())]
    kept[0].add({"n": 1})
    gone = WriteAheadLog("run", this_process(ended.pid))
    names = set(shm.iterdir())
    assert len(list(shm.iterdir())) == 3
    WriteAheadLog("run", this_process()).close()
    assert set(shm.iterdir()) == names
    long_ago = time.time() - write_ahead_log.KEPT_S - 1
    for path in names:
        os.utime(path, (long_ago, long_ago))
    assert WriteAheadLog("run", this_process()).left() == []
    assert kept[0].left() == [{"n": 1}]
    (deleted,) = names - set(shm.iterdir())
    assert gone._path == deleted


KILLED = """
import json, os, signal, sys
from pathlib import Path
from raydist.observe import write_ahead_log
from raydist.observe.run_monitor import RunMonitor
from raydist.records import Event
from raydist.run.driver_process import this_process

run, shm, rows = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
write_ahead_log.SHM = shm
if not int(sys.argv[4]):
    write_ahead_log._KEEPER = "exit"
driver = this_process()
monitor = os.fork()
if monitor == 0:
    def events(*steps):
        return [Event("eval", 5.0 + step, {"step": step, "loss": 1.0}).to_dict() for step in steps]
    made = RunMonitor(run, driver, interval_s=600.0, exporters=[])
    made.begin_attempt(1, 2, 0)
    made.push(rows[:1], events(1))
    made.flush()
    made.push(rows[1:], events(2))
    made._log.flush()  # killed before it can mark them as stored
    made.push([], events(3))
    made._write_ahead_log.add({"event": events(4)[0]})
    (path,) = shm.iterdir()
    with path.open("ab") as file:
        file.write(b'{"event": {"kind": "torn')
    print(os.getpid(), json.dumps(driver), flush=True)
    signal.pause()
os.waitpid(monitor, 0)
"""


@pytest.mark.parametrize("keeper", [0, 1])
def test_a_driver_that_is_killed_with_its_monitor(run: RunDir, rows: Rows, shm: Path, keeper: int) -> None:
    """SIGKILL of both. The run's next monitor stores the events that they had not stored, each once; not the steps, which are
    trained again. While the killed driver's monitor still runs it takes nothing, and nothing of another run's journal. After their
    end nothing stays in /dev/shm; if the shell that sees to it was killed too (keeper 0), until the next start."""
    run.storage.write("attempts/0001.json", b"{}")
    source = [sys.executable, "-c", KILLED, run.uri, str(shm), json.dumps(rows(range(1, 3))), str(keeper)]
    with subprocess.Popen(source, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid, _, told = process.stdout.readline().partition(" ")
        process.kill()
    try:
        killed = json.loads(told)
        (journal,) = shm.iterdir()
        waiting = WriteAheadLog(run.uri, this_process(), killed)
        assert waiting.left() == []
        assert journal.exists()
        waiting.close()
    finally:
        os.kill(int(pid), signal.SIGKILL)
    if keeper:
        until(lambda: not journal.exists())
        run.storage.write("journals/damaged.jsonl", b"{}\n")
    else:
        with journal.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until the last of its threads has ended
    other = WriteAheadLog("other", killed)
    other.add({"event": Event("eval", 1.0, {"step": 9}).to_dict()})
    next_one = RunMonitor(run.uri, this_process(), interval_s=60.0)
    assert not journal.exists()
    assert not run.storage.files("journals")
    # Its own monitor is killed before it has stored them, and replaced.
    next_one = RunMonitor(run.uri, next_one._driver, interval_s=60.0)
    assert next_one.snapshot()["events"] == []
    next_one.begin_attempt(2, 2, 1)
    next_one.push(rows(range(2, 4), attempt=2), [])
    next_one.end("finished")
    events = read_events(run)
    assert [e.kind for e in events] == ["attempt_started", *["eval"] * 4, "attempt_started", "ended"]
    assert [e.data["step"] for e in events if e.kind == "eval"] == [1, 2, 3, 4]
    assert read_steps(run)["step"].to_pylist() == [1, 2, 3]
    assert read_steps(run)["attempt"].to_pylist() == [1, 2, 2]
    assert list(shm.iterdir()) == [other._path]


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
