"""raydist.observe.run_monitor: the monitor as an object, without Ray."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from raydist.errors import StorageError
from raydist.observe.run_monitor import RunMonitor
from raydist.records import Event
from raydist.run import requests
from raydist.run.directory import METRICS, TENSORBOARD, RunDir
from raydist.run.driver_process import this_process
from raydist.run.log import read_events, read_steps
from raydist.run.status import last_word, read_state
from raydist.run.telemetry_log import read_samples

Rows = Callable[..., list[dict[str, Any]]]


def event(kind: str, **data: Any) -> dict[str, Any]:
    return Event(kind, 5.0, data).to_dict()


def monitor(run: RunDir, interval_s: float = 60.0, **options: Any) -> RunMonitor:
    """A monitor; with the default interval of a minute only flush and end store anything."""
    return RunMonitor(run.uri, interval_s=interval_s, **options)


def until(condition: Callable[[], bool]) -> None:
    """Waits until another thread has made the condition true."""
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.01)


def test_a_run_from_start_to_end(run: RunDir, rows: Rows) -> None:
    """Records, events and state are in the folder, in order; the status is that of the first `end`."""
    watch = monitor(run)
    assert read_state(run)["status"] == "running"
    watch.begin_attempt(1, 2, 0)
    watch.workers([{"rank": 0, "host": "h", "node_ip": "10.0.0.1", "pid": 7}])
    assert watch.push(rows(range(1, 4)), [event("eval", step=3, loss=2.5, tokens=64, best=True)]) == {"command": None}
    watch.end("finished")
    watch.end("stopped", cause="a second word changes nothing")
    assert read_steps(run)["step"].to_pylist() == [1, 2, 3]
    assert [e.kind for e in read_events(run)] == ["attempt_started", "workers", "eval", "ended"]
    assert read_events(run)[-1].data == {"status": "finished", "step": 3}
    state = read_state(run)
    assert (state["status"], state["step"], state["loss"], state["eval_loss"]) == ("finished", 3, 1 / 3, 2.5)
    assert (state["attempt"], state["world_size"], state["workers"][0]["pid"]) == (1, 2, 7)
    assert run.storage.files(TENSORBOARD)


def test_what_somebody_asks_for_is_in_the_answer(run: RunDir) -> None:
    """A push returns a request from the run's folder as long as its file exists."""
    watch = monitor(run, interval_s=0.01)
    mine = requests.ask_trace(run, 3, 60.0)
    until(lambda: watch.push([], []) == {"command": None, "traces": [(mine.number, 3)]})
    requests.withdraw(run, mine)
    until(lambda: watch.push([], []) == {"command": None})
    watch.end("finished")


def test_flush_makes_all_that_was_pushed_durable(run: RunDir, rows: Rows) -> None:
    """push stores nothing, flush stores everything: a driver that is killed right after a flush loses no row."""
    watch = monitor(run)
    watch.begin_attempt(1, 2, 0)
    watch.push(rows(range(1, 4)), [event("note", text="hello")])
    assert read_steps(run).num_rows == 0
    watch.flush()
    assert read_steps(run)["step"].to_pylist() == [1, 2, 3]
    assert read_events(run)[-1].data == {"text": "hello"}


def test_the_heartbeat_and_the_files_go_on_by_themselves(run: RunDir, rows: Rows) -> None:
    """Without a flush, records and a newer heartbeat reach storage within the interval."""
    watch = monitor(run, interval_s=0.02)
    first = last_word(run)
    watch.push(rows(range(1, 3)), [])
    until(lambda: read_steps(run).num_rows == 2)
    until(lambda: (last_word(run) or {})["heartbeat_at"] > (first or {})["heartbeat_at"])
    watch.end("paused")


def test_memory_is_bounded(run: RunDir, rows: Rows) -> None:
    """From its 800th step to its 3,200th the process grows by less than 16 MiB, though each of Ray's eight threads encodes the open
    segment in turn (with pages that Arrow's allocator keeps for each of them it was 40 MiB), and what Python holds by less than
    256 KiB, as the window of the rules has its full size from the start (with a dict a step it was 760 KiB)."""
    memory, watch = psutil.Process().memory_info, monitor(run, exporters=[])
    threads = [ThreadPoolExecutor(1) for _ in range(8)]
    watch.begin_attempt(1, 2, 0)

    def train(steps: range) -> tuple[int, int]:
        for number, first in enumerate(range(steps.start, steps.stop, 40)):
            watch.push(rows(range(first, first + 40)), [])
            watch._diagnose()
            threads[number % len(threads)].submit(watch.flush).result()
        return memory().rss, tracemalloc.get_traced_memory()[0]

    train(range(1, 401))
    tracemalloc.start()
    one, traced = train(range(401, 801))
    four, traced_then = train(range(801, 3201))
    tracemalloc.stop()
    watch.end("finished")
    assert (four - one) / 2**20 < 16
    assert traced_then - traced < 256 * 1024


def test_command_reaches_rank_0(run: RunDir) -> None:
    """After the driver's command every push returns it."""
    watch = monitor(run)
    assert watch.push([], []) == {"command": None}
    watch.command("stop")
    assert [watch.push([], []), watch.push([], [])] == [{"command": "stop"}] * 2
    assert watch.snapshot()["command"] == "stop"


def test_snapshot_gives_each_event_once(run: RunDir, rows: Rows) -> None:
    """A snapshot has the events since the number that the last one returned, in order."""
    watch = monitor(run)
    watch.begin_attempt(1, 2, 0)
    one = watch.snapshot()
    assert [e["kind"] for e in one["events"]] == ["attempt_started"]
    watch.push(rows(range(1, 3)), [event("note", text="a"), event("note", text="b")])
    two = watch.snapshot(one["next"])
    assert [e["text"] for e in two["events"]] == ["a", "b"]
    assert two["step"] == 2
    assert watch.snapshot(two["next"])["events"] == []


def test_resumed_below_the_announced_step(run: RunDir, rows: Rows) -> None:
    """If the newest checkpoint is rejected, the step at which the worker resumed replaces the step that the driver announced."""
    watch = monitor(run)
    watch.begin_attempt(1, 2, 0)
    watch.push(rows(range(1, 11)), [])
    watch.begin_attempt(2, 2, 8)
    watch.push([], [event("resumed", step=4, path="checkpoints/step-00000004")])
    watch.flush()
    assert read_steps(run)["step"].to_pylist() == [1, 2, 3, 4]
    watch.push(rows(range(5, 7), 2), [])
    watch.end("interrupted")
    assert read_steps(run)["attempt"].to_pylist() == [1, 1, 1, 1, 2, 2]


def test_storage_that_refuses_costs_nothing_but_time(run: RunDir, rows: Rows) -> None:
    """A refused write is shown in the snapshot and tried again; push does not wait; flush raises after its timeout; in the end
    every row is stored."""
    watch = monitor(run, interval_s=0.02)
    obstacle = Path(run.storage.path(METRICS))
    obstacle.write_text("a file where the folder should be")
    watch.begin_attempt(1, 2, 0)
    watch.push(rows(range(1, 4)), [])
    until(lambda: bool(watch.snapshot()["storage_error"]))
    with pytest.raises(StorageError, match=METRICS):
        watch.flush(timeout_s=0.0)
    watch.push(rows(range(4, 6)), [])
    obstacle.unlink()
    until(lambda: watch.snapshot()["storage_error"] is None)
    watch.end("finished")
    assert read_steps(run)["step"].to_pylist() == [1, 2, 3, 4, 5]
    notes = [e.data["text"] for e in read_events(run) if e.kind == "note"]
    assert len(notes) == 1
    assert "could not be written" in notes[0]


def test_flush_waits_until_storage_takes_it(run: RunDir, rows: Rows) -> None:
    """flush does not raise if storage works again within its timeout."""
    watch = monitor(run)
    obstacle = Path(run.storage.path(METRICS))
    obstacle.write_text("a file where the folder should be")
    watch.push(rows(range(1, 4)), [])
    failed: list[BaseException] = []

    def flush() -> None:
        try:
            watch.flush(timeout_s=20.0)
        except BaseException as error:
            failed.append(error)

    waiting = threading.Thread(target=flush)
    waiting.start()
    until(lambda: bool(watch.snapshot()["storage_error"]))
    obstacle.unlink()
    waiting.join()
    assert not failed
    assert read_steps(run).num_rows == 3


def test_storage_that_cannot_be_written_is_known_at_once(tmp_path: Path) -> None:
    """The constructor raises, so a run whose records cannot be stored does not start."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="its run's folder is gone"):
        RunMonitor(str(tmp_path / "file" / "run"))


def test_a_second_monitor_of_the_same_driver(run: RunDir, rows: Rows) -> None:
    """A monitor that Ray started after a kill continues from the stored state, and accepts records at once."""
    driver = this_process()
    first = monitor(run, driver=driver)
    first.begin_attempt(3, 2, 10)
    first.workers([{"rank": 0, "host": "h", "node_ip": "10.0.0.1", "pid": 7}])
    first.push(rows(range(11, 13), 3), [])
    first.flush()
    first._store_state()
    second = monitor(run, driver=driver)
    now = second.snapshot()
    assert (now["attempt"], now["world_size"], now["step"], now["workers"][0]["pid"]) == (3, 2, 12, 7)
    second.push(rows(range(13, 15), 3), [])
    second.end("finished")
    assert read_steps(run)["step"].to_pylist() == [11, 12, 13, 14]
    third = monitor(run, driver=driver)
    third._store_state()
    assert read_state(run)["status"] == "finished", "a monitor that comes back after the end must not revive the run"


def test_a_run_that_goes_on_below_the_same_driver(run: RunDir) -> None:
    """A new attempt under the same driver sets the status to running again, as for a sweep's cell in its next turn."""
    driver = this_process()
    monitor(run, driver=driver).end("interrupted")
    second = monitor(run, driver=driver)
    second.begin_attempt(2, 1, 4)
    second._store_state()
    assert read_state(run)["status"] == "running"


def test_a_new_driver_starts_anew(run: RunDir, rows: Rows) -> None:
    """An ended run is running again under a new driver; its last eval loss is kept until the next one."""
    first = monitor(run)
    first.begin_attempt(1, 2, 0)
    first.push(rows(range(1, 5)), [event("eval", step=4, loss=2.5, tokens=64, best=True)])
    first.end("paused")
    second = monitor(run)
    assert read_state(run)["status"] == "running"
    second.begin_attempt(2, 3, 4)
    second._store_state()
    state = read_state(run)
    assert (state["step"], state["eval_loss"], state["world_size"]) == (4, 2.5, 3)


def test_a_bad_push_is_the_pushers_error(run: RunDir, rows: Rows) -> None:
    """A bad push raises KeyError, and the monitor continues."""
    watch = monitor(run)
    with pytest.raises(KeyError):
        watch.push([{"step": 1}], [])
    with pytest.raises(KeyError):
        watch.push([], [event("eval", step=1)])
    watch.push(rows(range(1, 3)), [])
    watch.end("finished")
    assert read_steps(run).num_rows == 2
    assert [e.kind for e in read_events(run)] == ["ended"]


def reading(rank: int, at: float, attempt: int = 1) -> dict[str, Any]:
    return {"at": at, "kind": "rank", "node": "10.0.0.1", "rank": rank, "attempt": attempt, "rss_bytes": 7}


def test_readings_are_stored(run: RunDir) -> None:
    """Readings of each rank are stored, also a late one of the previous attempt."""
    watch = monitor(run)
    watch.begin_attempt(1, 2, 0)
    watch.observe([reading(0, 1.0), reading(1, 1.0)])
    watch.begin_attempt(2, 1, 0)
    watch.observe([reading(1, 2.0)])
    watch.observe([reading(0, 3.0, attempt=2), {"at": 3.0, "kind": "node", "node": "10.0.0.1", "load": 0.5}])
    watch.end("finished")
    assert read_samples(run, ["at"])["at"].to_pylist() == [1.0, 1.0, 2.0, 3.0, 3.0]
