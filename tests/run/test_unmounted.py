"""Storage that is unmounted before a writer's first write: nothing is written below the mount point, and nothing is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raydist.errors import StorageError
from raydist.launch.agent import store_look
from raydist.launch.rank_output import Output
from raydist.observe import write_ahead_log
from raydist.observe.aggregator import Aggregator
from raydist.observe.exporters import Facts
from raydist.observe.exporters.jsonl import Exporter
from raydist.observe.run_monitor import RunMonitor
from raydist.records import StepRecord
from raydist.run import directory
from raydist.run.directory import SPEC, RunDir, await_attempt, begin_attempt
from raydist.run.driver_process import this_process
from raydist.run.lease import DriverLease
from raydist.run.log import read_steps
from raydist.run.sweep_directory import SweepDir
from raydist.storage import GONE
from tests.mounting import Disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A mounted file system, which is unmounted at the end."""
    made = Disk(tmp_path)
    yield made
    if made.mounted:
        made.unmount()


@pytest.fixture
def run(disk: Disk) -> RunDir:
    """A run that a driver has started, on that file system."""
    run = RunDir(disk.home / "run")
    with DriverLease(run):
        run.storage.write(SPEC, b"name: run\n")
        begin_attempt(run, 1)
    return run


def mounts_while_waiting(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on a wait for the folder mounts it in place of sleeping; one entry for each."""
    waits: list[int] = []

    def sleep(seconds: float) -> None:
        waits.append(1)
        disk.mount()

    monkeypatch.setattr(directory, "time", SimpleNamespace(monotonic=time.monotonic, time=time.time, sleep=sleep))
    return waits


def rank(run: RunDir) -> Callable[[], object]:
    """A shard of a rank that has waited for its attempt and has written nothing."""
    await_attempt(run, 1)
    return lambda: run.storage.write("checkpoints/step-00000001/shard-1", b"x")


def later_runs(run: RunDir) -> Callable[[], object]:
    """What rank 0 measures for the runs beside this one."""
    await_attempt(run, 1)
    return lambda: run.home.write(".tuned/a.json", b"{}")


def output(run: RunDir) -> Callable[[], object]:
    made = Output(run.full_uri, 1, 0)
    made.abandon()  # its pipe
    return lambda: made._put(b"text\n")


def stacks(run: RunDir) -> Callable[[], object]:
    return lambda: store_look(run.full_uri, 1, 0, "stacks", None)


def monitor(run: RunDir) -> Callable[[], object]:
    return lambda: RunMonitor(run.uri, exporters=[])


def aggregator(run: RunDir) -> Callable[[], object]:
    return lambda: Aggregator(run.uri, 1, None, wait_s=0.0)


def exporter(run: RunDir) -> Callable[[], object]:
    """Lines beside the records."""
    made = Exporter(Facts(run, Exporter.resolve({}, run)))
    made.event({"kind": "note"})
    return made.flush


def trial(run: RunDir) -> Callable[[], object]:
    """The first file of a trial, in the folder of its sweep."""
    sweep = SweepDir(RunDir(run.uri).storage)
    with DriverLease(RunDir(sweep.storage)):
        return lambda: sweep.run("a").storage.write(SPEC, b"{}")


@pytest.mark.parametrize("writer", [rank, later_runs, output, stacks, monitor, aggregator, exporter, trial])
def test_the_first_write_after_an_unmount(disk: Disk, run: RunDir, writer: Callable[[RunDir], Any]) -> None:
    """It raises StorageError, and nothing is below the mount point."""
    write = writer(RunDir(run.uri))
    disk.unmount()
    with pytest.raises(StorageError, match="No such file" if writer is exporter else GONE.replace("?", "[?]")):
        write()
    disk.mount()


def test_the_file_system_may_be_mounted_at_the_run_itself(tmp_path: Path) -> None:
    """The empty folder is then there, but has none of the files of a run that has begun."""
    run, aside = RunDir(tmp_path / "run"), tmp_path / "aside"
    begin_attempt(run, 1)
    mine = RunDir(run.uri)
    await_attempt(mine, 1)
    Path(run.uri).rename(aside)
    Path(run.uri).mkdir()
    with pytest.raises(StorageError, match="folder is gone"):
        mine.storage.write("state.json", b"{}")
    with pytest.raises(StorageError, match="folder is gone"):
        mine.storage.append("events.jsonl", b"{}")
    assert list(Path(run.uri).iterdir()) == []


def test_a_restarted_monitor_waits_for_the_mount(
    disk: Disk, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It then continues the records: the rows that were stored before, and those that only its predecessor's memory had."""
    monkeypatch.setattr(write_ahead_log, "SHM", tmp_path)
    rows = [StepRecord(s, 1 / s, 1e-3, 0.5, 100, 0.1, 0.01, 2, 1, f"{s:016x}").to_dict() for s in range(1, 6)]
    driver = this_process()
    first = RunMonitor(run.uri, driver, interval_s=1e9, exporters=[])
    first.begin_attempt(1, 2, 0)
    first.push(rows[:3], [])
    first.flush()
    first.push(rows[3:], [])  # and is killed
    disk.unmount()
    waits = mounts_while_waiting(disk, monkeypatch)
    second = RunMonitor(run.uri, driver, interval_s=1e9, exporters=[])
    assert waits == [1]
    second.end("finished")
    assert read_steps(run)["step"].to_pylist() == [1, 2, 3, 4, 5]


def test_the_aggregator_waits_for_the_mount(disk: Disk, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """It then numbers its segments after those that are there."""
    handle: Any = SimpleNamespace(export=SimpleNamespace(remote=lambda rows: None))
    reading = {"at": 1.0, "kind": "rank", "host": "h", "node": "n", "rank": 0, "attempt": 1, "step": 1}
    waits = mounts_while_waiting(disk, monkeypatch)
    for _ in range(2):
        disk.unmount()
        made = Aggregator(run.uri, 1, handle, interval_s=1e9, wait_s=240.0)
        made.observe([reading])
        made.close()
    assert waits == [1, 1]
    assert len(run.storage.files("samples")) == 2
