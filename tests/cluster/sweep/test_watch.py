"""A limit is reached while trials train: they save a checkpoint, no other trial starts, and the sweep ends."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raydist.cluster.session import Session
from raydist.cluster.sweep.ray_tune import TrialQueue
from raydist.cluster.sweep.sweep import Ended, SweepRun
from raydist.cluster.sweep.trial import EndRequest
from raydist.cluster.sweep.trial_runner import TrialRunner
from raydist.cluster.sweep.worker_group_pool import WorkerGroupPool
from raydist.errors import PreflightError, TrainingStopped
from raydist.report.sweep.standing import Spent
from raydist.run.sweep_directory import SweepDir, SweepLog
from raydist.spec.sweep import SweepSpec


class Noted:
    """A display that only records its calls; also used as a trial runner's pool without slots."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.counts: Any = None

    def update(self, live: Any, counts: Any, spent: Spent) -> None:
        self.counts = counts

    def note(self, text: str) -> None:
        self.notes.append(text)

    def close(self) -> None:
        """As a pool, it has nothing to close."""


class Training:
    """A trial that has trained for half an hour on workers with this number of GPUs, and ends when it is requested to."""

    gone = None

    def __init__(self, name: str, workers: int, gpus: float) -> None:
        self.id = name
        self.hours = 0.5
        self.plan = SimpleNamespace(workers=workers, request=SimpleNamespace(gpus=gpus))
        self.live = name
        self.told: list[EndRequest] = []
        self.end_request = self.status = None
        self.ended = threading.Event()

    def end(self, end_request: EndRequest) -> None:
        self.told.append(end_request)
        self.ended.set()

    def join(self, timeout_s: float | None = None) -> bool:
        return self.ended.wait(timeout_s)


def trial_runner_of(tmp_path: Path, *training: Training) -> tuple[TrialRunner, SweepLog]:
    """A trial runner with these trials in progress."""
    log = SweepLog(SweepDir(tmp_path))
    nothing: Any = lambda *_: None  # noqa: E731
    pool, session = cast(WorkerGroupPool, Noted()), cast(Session, None)
    trial_runner = TrialRunner(session, pool, log, nothing, nothing, nothing, {}, metric="loss", allowed=0)
    trial_runner._trials = cast(Any, {cell.id: cell for cell in training})
    return trial_runner, log


def test_hours_of_workers_and_of_their_gpus(tmp_path: Path) -> None:
    """Worker-hours are hours x workers, GPU-hours also x GPUs per worker; those of an ended trial remain."""
    two, none = Training("two", 2, 4.0), Training("none", 3, 0.0)
    trial_runner, _ = trial_runner_of(tmp_path, two, none)
    assert trial_runner.used() == (4.0, 2.5)
    two.ended.set()
    assert trial_runner.live() == ["none"]
    assert trial_runner.used() == (4.0, 2.5)


def test_reports_of_an_earlier_stretch(tmp_path: Path) -> None:
    """If a trial starts again, its earlier reports are forgotten, though the trial runner no longer knows that stretch; those of
    a running trial are kept."""
    told: list[tuple[str, ...]] = []

    def refuse(cell: str, changes: Any) -> Any:
        raise PreflightError("no room", "")

    trains = Training("trains", 1, 0.0)
    trial_runner, _ = trial_runner_of(tmp_path, trains)
    trial_runner._plan = refuse
    trial_runner._forget_reports = lambda cell: told.append(("forget", cell))
    trial_runner._post = lambda cell, report: told.append(("post", cell))
    trial_runner.begin("again")
    trial_runner.begin("trains")
    assert told == [("forget", "again"), ("post", "again")]


@pytest.mark.parametrize(
    ("limits", "earlier", "gpus", "why"),
    [
        ({"gpu_hours": 1}, Spent(), 1.0, "limits.gpu_hours is 1"),
        ({"gpu_hours": 10}, Spent(0.0, 9.5, 9.5), 0.5, "limits.gpu_hours is 10"),
        ({"hours": 2}, Spent(1.0), 0.0, "limits.hours is 2"),
        ({"gpu_hours": 10, "hours": 1.5}, Spent(), 1.0, "limits.hours is 1.5"),
    ],
)
def test_a_limit_is_reached(tmp_path: Path, limits: Any, earlier: Spent, gpus: float, why: str) -> None:
    """By the half hour of two workers, or by 1.5 hours of wall time, both with the hours of earlier drivers: the trial is to save
    a checkpoint and end, the others wait."""
    spec = SweepSpec.model_validate({"base": "b.yaml", "array": {"parameters": [{"lr": [1, 2]}]}, "limits": limits})
    cell, view, queue = Training("cell", 2, gpus), Noted(), TrialQueue(["waits"], 1, "10.0.0.1")
    trial_runner, log = trial_runner_of(tmp_path, cell)
    run = SweepRun(
        spec, [], SweepDir(tmp_path), {"cell": {}, "waits": {}}, cast(Any, None), cast(Session, None), view,
        tokens=1, at_once=1,
    )  # fmt: skip
    run._done, run._before, run._began = {}, earlier, time.monotonic() - 1.5 * 3600
    thread = threading.Thread(target=cell.join)
    thread.start()
    assert run._watch(thread, trial_runner, log, queue) == Ended("paused", why)
    thread.join()
    assert cell.told == [EndRequest("paused", why, at_once=False)]
    assert view.notes == [f"{why}: every running trial saves a checkpoint and pauses; the others wait"]
    assert queue.is_finished()
    assert queue.left == 1


def test_raydist_stop(tmp_path: Path) -> None:
    """Requested from another shell: it acts as one SIGINT, with no second one while the request exists."""
    spec = SweepSpec.model_validate({"base": "b.yaml", "array": {"parameters": [{"lr": [1, 2]}]}})
    cell, view, queue = Training("cell", 2, 0.0), Noted(), TrialQueue(["waits"], 1, "10.0.0.1")
    trial_runner, log = trial_runner_of(tmp_path, cell)
    run = SweepRun(
        spec, [], SweepDir(tmp_path), {"cell": {}, "waits": {}}, cast(Any, None), cast(Session, None), view,
        tokens=1, at_once=1, asked=lambda: "process 7 on h",
    )  # fmt: skip
    run._done, run._before, run._began = {}, Spent(), time.monotonic()
    thread = threading.Thread(target=cell.join)
    thread.start()
    assert run._watch(thread, trial_runner, log, queue) == Ended("interrupted", "interrupted", signal.SIGINT)
    thread.join()
    assert cell.told == [EndRequest("paused", "interrupted", at_once=False)]
    assert view.notes[0] == "stop requested by process 7 on h"


def test_a_sweep_that_has_failed_has_not_finished(tmp_path: Path) -> None:
    """Its last event says why it ended. If another driver has taken it over, the last event is that driver's."""
    spec = SweepSpec.model_validate({"base": "b.yaml", "array": {"parameters": [{"lr": [1, 2]}]}})
    for lost in (None, TrainingStopped("another driver has taken over")):
        folder, cell, queue = SweepDir(tmp_path / str(lost)), Training("cell", 2, 0.0), TrialQueue([], 1, "10.0.0.1")
        trial_runner, log = trial_runner_of(tmp_path, cell)
        log = SweepLog(folder)
        run = SweepRun(
            spec, [], folder, {"cell": {}}, cast(Any, None), cast(Session, None), Noted(),
            tokens=1, at_once=1, lost=lambda lost=lost: lost,
        )  # fmt: skip
        run._done, run._before, run._began = {}, Spent(), time.monotonic()
        if lost is None:
            run._error = TrainingStopped("sweep s: Ray Tune has failed: KeyError: 1", "run the same command again")
            cell.end(EndRequest("paused", "Ray Tune has failed", at_once=False))
        thread = threading.Thread(target=cell.join)
        thread.start()
        run._log_end(log, run._watch(thread, trial_runner, log, queue))
        thread.join()
        ended = [(event.data["status"], event.data["cause"]) for event in folder.events() if event.kind == "ended"]
        assert ended == ([("paused", "sweep s: Ray Tune has failed: KeyError: 1")] if lost is None else [])


def test_what_a_search_will_not_choose_is_not_waited_for(tmp_path: Path) -> None:
    """Of three points of the search there are only two: one trains, one has ended, and none waits."""
    spec = SweepSpec.model_validate({"base": "b.yaml", "array": {"parameters": [{"lr": [1, 2]}]}})
    view, search = Noted(), SimpleNamespace(count=3)
    trial_runner, log = trial_runner_of(tmp_path, Training("two", 1, 0.0))
    run = SweepRun(
        spec, [], SweepDir(tmp_path), {}, cast(Any, None), cast(Session, None), view,
        tokens=1, at_once=1, search=cast(Any, search),
    )  # fmt: skip
    run._done, run._before, run._began = {"one": "finished"}, Spent(), time.monotonic()
    for count, waiting in ((3, 1), (2, 0)):
        search.count = count
        run._show(trial_runner, log)
        assert [view.counts[name] for name in ("finished", "running", "waiting")] == [1, 1, waiting]
