"""`raydist stop`: which driver it asks, what it waits for, and its output if there is no driver. Drivers here are only leases."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from raydist.api import stopping
from raydist.cli import stop
from raydist.errors import RunNotFound, StopFailed, UsageError
from raydist.records import Event
from raydist.run import lease as leases
from raydist.run.directory import SPEC, RunDir
from raydist.run.driver_process import LOST_AFTER_S, this_process
from raydist.run.lease import DriverLease, ask_stop, newest_driver
from raydist.run.status import write_state
from raydist.run.sweep_directory import CellNote, SweepDir, SweepLog


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drivers and commands poll often."""
    monkeypatch.setattr(leases, "STOP_LOOK_S", 0.02)
    monkeypatch.setattr(stopping, "POLL_S", 0.02)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run at step 7."""
    run = RunDir(tmp_path / "a-run")
    run.storage.write(SPEC, b"name: a-run\n")
    state(run, "running")
    return run


def state(run: RunDir, status: str) -> None:
    """The last status that the run's monitor wrote."""
    write_state(run, {"status": status, "heartbeat_at": time.time(), "driver": this_process(), "step": 7})


def call(*arguments: str) -> Any:
    """The result of the command; its exceptions are not caught."""
    app = typer.Typer()
    app.command()(stop.stop)
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def driving(folder: RunDir, end: Callable[[], None]) -> threading.Thread:
    """A driver that, when it is asked to stop, calls `end` and releases its lease. It has the lease when this returns."""
    lease = DriverLease(folder)

    def drive() -> None:
        deadline = time.monotonic() + 240
        while lease.asked_to_stop() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        end()
        lease.release()

    thread = threading.Thread(target=drive)
    thread.start()
    return thread


def test_asks_waits_and_tells(run: RunDir) -> None:
    """The driver sees the request while it has the lease; the command returns after the release, with status and step."""
    thread = driving(run, lambda: state(run, "interrupted"))
    done = call(run.uri)
    thread.join()
    assert (done.exit_code, done.stdout) == (
        0,
        "run a-run: interrupted at step 7, without a checkpoint; the same command resumes it\n",
    )
    assert "after one checkpoint" in done.stderr


def test_two_at_once(run: RunDir) -> None:
    """A second request for the same driver is not a new one; the command that waits returns when the run ends."""
    thread = driving(run, lambda: state(run, "interrupted"))
    results: list[Any] = []
    first = threading.Thread(target=lambda: results.append(stopping.wait(stopping.Driven(run), newest_driver(run), 30)))  # type: ignore[arg-type]
    first.start()
    driver = newest_driver(run)
    assert driver is not None
    asked = ask_stop(run, driver)
    assert asked
    assert not ask_stop(run, driver)
    first.join()
    thread.join()
    assert results == [None]


def test_not_carried_over(run: RunDir) -> None:
    """A request to a driver that ended by itself, or was killed before it saw the request, does not stop the next driver."""
    lease = DriverLease(run)
    driver = newest_driver(run)
    assert driver is not None
    lease.release()
    ask_stop(run, driver)  # too late
    with DriverLease(run) as after:
        after._look_for_stop()
        assert after.asked_to_stop() is None
        assert [name for name in run.storage.files("drivers") if name.endswith(".stop")] == []


def test_only_asks(run: RunDir) -> None:
    """--no-wait returns at once; the request stays until the driver sees it."""
    lease = DriverLease(run)
    done = call(run.uri, "--no-wait", "--json")
    assert json.loads(done.stdout) == {
        "name": "a-run",
        "path": run.uri,
        "status": "running",
        "step": 7,
        "asked": True,
        "ended": False,
    }
    lease._look_for_stop()
    assert "process" in (lease.asked_to_stop() or "")
    lease.release()


def test_not_in_time(run: RunDir) -> None:
    """Exit code 3, with the run's step; the request stays."""
    with DriverLease(run) as lease, pytest.raises(StopFailed, match="has not ended in 0 s: at step 7") as caught:
        lease._look_for_stop = lambda: None  # type: ignore[method-assign]  # busy
        call(run.uri, "--timeout", "0")
    assert caught.value.exit_code == 3
    assert "the request stays" in caught.value.hint


@pytest.mark.parametrize("status", ["finished", "interrupted"])
def test_nobody_drives_it(run: RunDir, status: str) -> None:
    """One line and exit code 0: the run is already stopped."""
    DriverLease(run).release()
    state(run, status)
    done = call(run.uri)
    assert done.exit_code == 0
    assert done.stdout == f"run a-run is {status} at step 7, without a checkpoint: there is nothing to stop\n"


def put(run: RunDir, age: float, **changes: Any) -> None:
    """The lease of a driver on another host, whose name has an escape sequence."""
    driver = {"host": "else\x1b[31mwhere", "pid": 77, "pids": "other", "since": time.time() - age}
    body = {"driver": driver, "key": "theirs", "renewed_at": time.time() - age, "ended": False, **changes}
    run.storage.write("drivers/000004.json", json.dumps(body).encode())


@pytest.mark.parametrize(
    ("age", "when"), [(LOST_AFTER_S + 10, "40 s ago"), (-86_400.0, "at a time 86400 s ahead of this host's clock")]
)
def test_a_dead_driver(run: RunDir, age: float, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease has expired, or is of a wrong clock: the message names the driver and how to resume; no request is written."""
    at = time.time()
    monkeypatch.setattr(time, "time", lambda: at)  # its age is in the message
    put(run, age)
    done = call(run.uri)
    assert done.exit_code == 0
    assert (
        f"run a-run is not training: its driver, process 77 on elsewhere, last renewed its lease {when} and is"
        in done.stdout
    )
    assert "the same command resumes it" in done.stdout
    assert not run.storage.exists("drivers/000004.stop")


def test_a_driver_that_dies_on_the_way(run: RunDir) -> None:
    """The run did not end cleanly, and the error says so."""
    put(run, 0.0)
    driver = newest_driver(run)
    assert driver is not None
    put(run, LOST_AFTER_S + 1)
    with pytest.raises(StopFailed, match="process 77 on elsewhere, died before it ended the run"):
        stopping.wait(stopping.Driven(run), driver, 30)


def test_ctrl_c_withdraws_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 130; the run still ends, and the message says so."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stopping, "wait", interrupted)
    with DriverLease(run):
        done = call(run.uri)
        assert run.storage.exists("drivers/000001.stop")
    assert done.exit_code == 130
    assert "run a-run is still stopping" in done.stderr


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDir:
    """A sweep of two cells, one of which has finished."""
    sweep = SweepDir(tmp_path / "a-sweep")
    sweep.write("", "", [CellNote(i, f"c{i}", i, {}, 0) for i in range(2)])
    log = SweepLog(sweep)
    for event in (
        Event("began", 0.0, {}),
        Event("started", 0.0, {"cell": "c0"}),
        Event("finished", 0.0, {"cell": "c0"}),
    ):
        log.event(event.kind, **event.data)
    log.flush()
    sweep.run("c0").storage.write(SPEC, b"")
    return sweep


def test_a_sweep(sweep: SweepDir) -> None:
    """By its name, as for a run; the message counts cells. A single cell is refused, with the sweep's name in the hint."""

    def end() -> None:
        log = SweepLog(sweep)
        log.event("ended", status="interrupted", cause="")
        log.flush()

    home = str(Path(sweep.uri).parent)
    thread = driving(RunDir(sweep.storage), end)
    done = call("a-sweep", "--storage", home)
    thread.join()
    assert done.stdout == ("sweep a-sweep: interrupted 2 cells: 1 finished, 1 waiting; the same command resumes it\n")
    with pytest.raises(UsageError, match="run c0 is a cell of sweep a-sweep") as caught:
        call(f"{sweep.uri}/runs/c0")
    assert f"raydist stop {sweep.uri}" in caught.value.hint
    with pytest.raises(RunNotFound) as not_found:
        call("a-swep", "--storage", home)
    assert "did you mean 'a-sweep'?" in not_found.value.hint
