"""A limit is reached while cells train: they are asked for a checkpoint, nothing begins any more, and so the sweep ended."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raydist.cluster.session import Session
from raydist.cluster.sweep.budget import Spent
from raydist.cluster.sweep.ray_tune import CellQueue
from raydist.cluster.sweep.sweep import Ended, SweepRun
from raydist.cluster.sweep.trial import EndRequest
from raydist.cluster.sweep.trial_runner import TrialRunner
from raydist.cluster.sweep.worker_group_pool import WorkerGroupPool
from raydist.errors import PreflightError
from raydist.run.sweep_directory import SweepDir, SweepLog
from raydist.spec.sweep import SweepSpec


class Noted:
    """A display that only notes, and a trial runner's pool that gives nothing."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.counts: Any = None

    def update(self, live: Any, counts: Any, spent: Spent) -> None:
        self.counts = counts

    def note(self, text: str) -> None:
        self.notes.append(text)

    def close(self) -> None:
        """Of the pool."""


class Training:
    """A cell that has trained for half an hour on workers of so many GPUs, and ends once it is told to."""

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
    """A trial runner on which these train."""
    log = SweepLog(SweepDir(tmp_path))
    nothing: Any = lambda *_: None  # noqa: E731
    pool, session = cast(WorkerGroupPool, Noted()), cast(Session, None)
    trial_runner = TrialRunner(session, pool, log, nothing, nothing, nothing, {}, metric="loss", allowed=0)
    trial_runner._cells = cast(Any, {cell.id: cell for cell in training})
    return trial_runner, log


def test_hours_of_workers_and_of_their_gpus(tmp_path: Path) -> None:
    """Hours with workers x workers, x GPUs of each; those of a cell that has ended stay."""
    two, none = Training("two", 2, 4.0), Training("none", 3, 0.0)
    trial_runner, _ = trial_runner_of(tmp_path, two, none)
    assert trial_runner.used() == (4.0, 2.5)
    two.ended.set()
    assert trial_runner.live() == ["none"]
    assert trial_runner.used() == (4.0, 2.5)


def test_reports_of_an_earlier_stretch(tmp_path: Path) -> None:
    """A cell that begins again reports anew, though the trial runner knows nothing any more of the stretch before; while it trains
    nothing is taken from it."""
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
    """By what two workers have used in half an hour, or by 1.5 hours on the wall, with what drivers before have spent: the cell is
    to make a checkpoint and end, the others wait."""
    spec = SweepSpec.model_validate({"base": "b.yaml", "array": {"parameters": [{"lr": [1, 2]}]}, "limits": limits})
    cell, view, queue = Training("cell", 2, gpus), Noted(), CellQueue(["waits"], 1, "10.0.0.1")
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
    assert view.notes == [f"{why}: a checkpoint of every cell that trains; the others wait"]
    assert queue.is_finished()
    assert queue.left == 1


def test_raydist_stop(tmp_path: Path) -> None:
    """Asked from another shell: as one SIGINT, and no second one while the request stands."""
    spec = SweepSpec.model_validate({"base": "b.yaml", "array": {"parameters": [{"lr": [1, 2]}]}})
    cell, view, queue = Training("cell", 2, 0.0), Noted(), CellQueue(["waits"], 1, "10.0.0.1")
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
    assert view.notes[0] == "`raydist stop`, process 7 on h, asks this sweep to end"


def test_what_a_search_will_not_choose_is_not_waited_for(tmp_path: Path) -> None:
    """Of three points that it was to try there are two: one trains, one is over, and none waits."""
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
