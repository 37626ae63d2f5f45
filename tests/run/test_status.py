"""raydist.run.status: the status of a run, as a reader derives it from the last state."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer

from raydist.errors import StorageError
from raydist.run.directory import SPEC, STATE, RunDir
from raydist.run.driver_process import LOST_AFTER_S, this_process
from raydist.run.lease import DriverLease
from raydist.run.status import last_word, read_state, write_state


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "a-run")


def state(**changes: Any) -> dict[str, Any]:
    return {"status": "running", "heartbeat_at": 1000.0, "driver": this_process(), **changes}


@pytest.mark.parametrize(
    ("age", "status"),
    [
        (0.0, "running"),
        (LOST_AFTER_S, "running"),
        (LOST_AFTER_S + 1, "lost"),
        (-LOST_AFTER_S, "running"),
        (-86_400.0, "lost"),
    ],
)
def test_old_heartbeat_means_lost(run: RunDir, age: float, status: str) -> None:
    """A run with the status running is lost 30 s after its last heartbeat, and not before; also if that is a day ahead."""
    write_state(run, state())
    assert read_state(run, now=1000.0 + age)["status"] == status


@pytest.mark.parametrize("status", ["finished", "paused", "stopped", "interrupted"])
def test_a_terminal_status_stays(run: RunDir, status: str) -> None:
    """A terminal status does not become lost, however old it is, and although its driver has exited."""
    write_state(run, state(status=status, driver={**this_process(), "pid": 2**22 + 1}))
    assert read_state(run, now=1e9)["status"] == status


def test_dead_driver_on_this_host_means_lost_at_once(run: RunDir) -> None:
    """With a fresh heartbeat, a run is running while its driver's process is, and lost once that has exited, also as a zombie."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as driver:
        write_state(run, state(driver=this_process(driver.pid)))
        assert read_state(run, now=1001.0)["status"] == "running"
        driver.kill()
        os.waitid(os.P_PID, driver.pid, os.WEXITED | os.WNOWAIT)
        assert read_state(run, now=1001.0)["status"] == "lost"
    assert read_state(run, now=1001.0)["status"] == "lost"


@pytest.mark.parametrize("change", [{"host": "another-host"}, {"pids": "another boot or container"}])
def test_process_ids_of_elsewhere_say_nothing(run: RunDir, change: dict[str, str]) -> None:
    """A process id of another host or container is not checked: the heartbeat alone decides."""
    write_state(run, state(driver={**this_process(2**22 + 1), **change}))
    assert read_state(run, now=1001.0)["status"] == "running"


def test_before_the_first_word(run: RunDir) -> None:
    """Between spec.yaml and the first heartbeat a run is running; if no heartbeat follows it is lost."""
    run.storage.write(SPEC, b"name: x\n")
    assert read_state(run) == {"status": "running"}
    assert read_state(run, now=time.time() + LOST_AFTER_S + 5) == {"status": "lost"}
    assert last_word(run) is None


def test_without_a_record_the_lease_tells(tmp_path: Path) -> None:
    """A driver that starts for longer than 30 s has not written a record: its run is running, the first time and when it resumes
    one that was lost. If it ends before its first record, by a signal or an error, the run is interrupted or stopped, at once."""
    for number, before in enumerate((None, state(driver=this_process(2**22 + 1), step=7))):
        run = RunDir(tmp_path / str(number))
        run.storage.write(SPEC, b"name: x\n")
        os.utime(tmp_path / str(number) / SPEC, (1.0, 1.0))
        if before is not None:
            write_state(run, before)
        assert read_state(run)["status"] == "lost"
        for error, status in (
            (KeyboardInterrupt(), "interrupted"),
            (typer.Exit(143), "interrupted"),
            (OSError(), "stopped"),
        ):
            with pytest.raises(type(error)), DriverLease(run):
                assert read_state(run)["status"] == "running"
                assert read_state(run).get("step") == (before or {}).get("step")
                raise error
            assert read_state(run)["status"] == status


def test_state_is_strict_json_and_damage_is_told(run: RunDir) -> None:
    """NaN becomes null; a damaged state.json raises StorageError with its name."""
    write_state(run, state(loss=math.nan, step=7))
    raw = json.loads(run.storage.read(STATE), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (raw["v"], raw["loss"], raw["step"]) == (1, None, 7)
    run.storage.write(STATE, b'{"status": "running"}')
    with pytest.raises(StorageError, match=r"state\.json is damaged"):
        read_state(run)
