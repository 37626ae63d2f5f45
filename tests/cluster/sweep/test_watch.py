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
from raydist.cluster.sweep.cell import Wish
from raydist.cluster.sweep.floor import Floor
from raydist.cluster.sweep.limits import Spent
from raydist.cluster.sweep.pool import Pool
from raydist.cluster.sweep.sweep import Ended, SweepRun
from raydist.cluster.sweep.tuning import CellQueue
from raydist.errors import PreflightError
from raydist.spec.sweep import SweepSpec
from raydist.sweepdir import SweepDir, SweepLog


class Noted:
    """A display that only notes, and a floor's pool that gives nothing."""

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
        self.told: list[Wish] = []
        self.wish = self.status = None
        self.ended = threading.Event()

    def end(self, wish: Wish) -> None:
        self.told.append(wish)
        self.ended.set()

    def join(self, timeout_s: float | None = None) -> bool:
        return self.ended.wait(timeout_s)


def floor_of(tmp_path: Path, *training: Training) -> tuple[Floor, SweepLog]:
    """A floor on which these train."""
    log = SweepLog(SweepDir(tmp_path))
    nothing: Any = lambda *_: None  # noqa: E731
    pool, session = cast(Pool, Noted()), cast(Session, None)
    floor = Floor(session, pool, log, nothing, nothing, nothing, {}, metric="loss", allowed=0)
    floor._cells = cast(Any, {cell.id: cell for cell in training})
    return floor, log


def test_hours_of_workers_and_of_their_gpus(tmp_path: Path) -> None:
    """Hours with workers x workers, x GPUs of each; those of a cell that has ended stay."""
    two, none = Training("two", 2, 4.0), Training("none", 3, 0.0)
    floor, _ = floor_of(tmp_path, two, none)
    assert floor.used() == (4.0, 2.5)
    two.ended.set()
    assert floor.live() == ["none"]
    assert floor.used() == (4.0, 2.5)


def test_reports_of_an_earlier_stretch(tmp_path: Path) -> None:
    """A cell that begins again reports anew, though the floor knows nothing any more of the stretch before; while it trains nothing
    is taken from it."""
    told: list[tuple[str, ...]] = []

    def refuse(cell: str, changes: Any) -> Any:
        raise PreflightError("no room", "")

    trains = Training("trains", 1, 0.0)
    floor, _ = floor_of(tmp_path, trains)
    floor._plan = refuse
    floor._forget_reports = lambda cell: told.append(("forget", cell))
    floor._post = lambda cell, report: told.append(("post", cell))
    floor.begin("again")
    floor.begin("trains")
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
    floor, log = floor_of(tmp_path, cell)
    run = SweepRun(
        spec, [], SweepDir(tmp_path), {"cell": {}, "waits": {}}, cast(Any, None), cast(Session, None), view,
        tokens=1, at_once=1,
    )  # fmt: skip
    run._done, run._before, run._began = {}, earlier, time.monotonic() - 1.5 * 3600
    thread = threading.Thread(target=cell.join)
    thread.start()
    assert run._watch(thread, floor, log, queue) == Ended("paused", why)
    thread.join()
    assert cell.told == [Wish("paused", why, at_once=False)]
    assert view.notes == [f"{why}: a checkpoint of every cell that trains; the others wait"]
    assert queue.is_finished()
    assert queue.left == 1


def test_raydist_stop(tmp_path: Path) -> None:
    """Asked from another shell: as one SIGINT, and no second one while the request stands."""
    spec = SweepSpec.model_validate({"base": "b.yaml", "array": {"parameters": [{"lr": [1, 2]}]}})
    cell, view, queue = Training("cell", 2, 0.0), Noted(), CellQueue(["waits"], 1, "10.0.0.1")
    floor, log = floor_of(tmp_path, cell)
    run = SweepRun(
        spec, [], SweepDir(tmp_path), {"cell": {}, "waits": {}}, cast(Any, None), cast(Session, None), view,
        tokens=1, at_once=1, asked=lambda: "process 7 on h",
    )  # fmt: skip
    run._done, run._before, run._began = {}, Spent(), time.monotonic()
    thread = threading.Thread(target=cell.join)
    thread.start()
    assert run._watch(thread, floor, log, queue) == Ended("interrupted", "interrupted", signal.SIGINT)
    thread.join()
    assert cell.told == [Wish("paused", "interrupted", at_once=False)]
    assert view.notes[0] == "`raydist stop`, process 7 on h, asks this sweep to end"


def test_what_a_search_will_not_choose_is_not_waited_for(tmp_path: Path) -> None:
    """Of three points that it was to try there are two: one trains, one is over, and none waits."""
    spec = SweepSpec.model_validate({"base": "b.yaml", "array": {"parameters": [{"lr": [1, 2]}]}})
    view, search = Noted(), SimpleNamespace(count=3)
    floor, log = floor_of(tmp_path, Training("two", 1, 0.0))
    run = SweepRun(
        spec, [], SweepDir(tmp_path), {}, cast(Any, None), cast(Session, None), view,
        tokens=1, at_once=1, search=cast(Any, search),
    )  # fmt: skip
    run._done, run._before, run._began = {"one": "finished"}, Spent(), time.monotonic()
    for count, waiting in ((3, 1), (2, 0)):
        search.count = count
        run._show(floor, log)
        assert [view.counts[name] for name in ("finished", "running", "waiting")] == [1, 1, waiting]
