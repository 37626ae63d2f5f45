"""Trials that are chosen from the results so far: each is logged before it trains, and the same ones follow after a killed
driver."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import yaml

from raydist.cluster.sweep import search as module
from raydist.cluster.sweep.sampler import PointResult, Sampler
from raydist.cluster.sweep.search import Search, require
from raydist.errors import SpecError, StorageError, TrainingStopped, UserError
from raydist.records import Event
from raydist.run.sweep_directory import SweepDir, SweepLog
from raydist.run.sweep_state import fold
from raydist.spec.sweep import Cell, Point, Sweep, load_sweep
from raydist.spec.sweep.models import SearchSpec

QUICKSTART = Path(__file__).parents[3] / "jobs/quickstart.yaml"
RATES = {"learning_rate": {"log_uniform": [1e-4, 1e-1]}}
Answers = Callable[[Sequence[PointResult]], "Point | None"]


def sweep(
    folder: Path, parameters: dict[str, Any] = RATES, samples: int = 6, kind: str = "random", **more: Any
) -> Sweep:
    """A search over these parameters."""
    array = {"type": kind, "samples": samples, "parameters": parameters, **more}
    path = folder / "s.yaml"
    path.write_text(yaml.safe_dump({"base": str(QUICKSTART), "array": array, "search": "optuna"}))
    return load_sweep(path)


def rate(told: Sequence[PointResult]) -> Point:
    """A learning rate that depends on all results so far."""
    digest = hashlib.sha256(repr(told).encode()).digest()
    return {"optim.lr": float(f"{1e-3 * (1 + digest[0] / 256 + len(told)):.5g}")}


def completed(answers: Answers) -> Any:
    """A sampler that answers at once."""

    def ask(told: Sequence[PointResult]) -> Future[Point | None]:
        future: Future[Point | None] = Future()
        try:
            future.set_result(answers(told))
        except Exception as error:
            future.set_exception(error)
        return future

    return ask


class Driver:
    """One start of a sweep: trials train one after another, with a loss that depends on their learning rate."""

    def __init__(self, asked: Sweep, folder: SweepDir, answers: Answers = rate, ask: Any = None) -> None:
        self.folder = folder
        events = folder.events()
        self.search = Search(asked, events)
        self.log = SweepLog(folder, self.search.note)
        self.kept: list[Cell] = []
        self.over: list[tuple[str, str]] = []
        self.search.begin(
            self.log, ask or completed(answers), self.kept.append, lambda cell, how: self.over.append((cell, how))
        )
        done = {
            cell for cell, state in fold(folder.events()).items() if state.status in ("finished", "failed", "stopped")
        }
        self.waiting = [cell.id for cell in self.search.cells if cell.id not in done and not cell.problems]

    def next(self) -> str | None:
        """The trial that trains now."""
        return self.waiting.pop(0) if self.waiting else self.search.next(wait=True)

    def finish(self, cell: str, loss: float | None = None, kind: str = "finished", **data: Any) -> None:
        """Ends the trial."""
        found = next(note for note in self.folder.cells() if note.id == cell)
        value = found.parameters["optim.lr"] if loss is None else loss
        self.log.event(kind, cell, figures={"eval_loss": value, "tokens": 640}, **data)

    def train(self) -> list[str]:
        """Trains until the last trial; their ids."""
        trained = []
        while cell := self.next():
            trained.append(cell)
            self.finish(cell)
        self.log.flush()
        return trained


def lines(folder: SweepDir) -> list[bytes]:
    """The lines of the sweep's log."""
    return [line for _, name in folder._segments() for line in folder.storage.read(name).splitlines(keepends=True)]


def started(path: Path) -> SweepDir:
    """A sweep's folder without trials."""
    folder = SweepDir(path)
    folder.write("", "", [])
    return folder


def test_it_is_on_storage_before_it_trains(tmp_path: Path) -> None:
    """When a trial is returned, the log has it and its plan was prepared; there are no more trials than the file says."""
    driver = Driver(sweep(tmp_path), started(tmp_path / "s"))
    for number in range(6):
        assert (driver.search.left, driver.search.count) == (6 - number, 6)
        cell = driver.next()
        added = [e.data["note"] for e in driver.folder.events() if e.kind == "added"]
        assert [added[-1]["id"], added[-1]["index"], added[-1]["point"]] == [cell, number, number]
        assert driver.kept[-1].id == cell
        assert driver.kept[-1].job.optim.lr == added[-1]["parameters"]["optim.lr"]
        driver.finish(str(cell))
    assert (driver.next(), driver.search.over, driver.search.because) == (None, True, "")


@pytest.mark.parametrize("seeds", [1, 2])
def test_killed_after_any_line(tmp_path: Path, seeds: int) -> None:
    """Whatever the last line of the log is, complete or truncated, the next driver chooses the same trials as the first one would
    have, and trains no finished trial again."""
    asked = sweep(tmp_path, seeds=seeds)
    whole = Driver(asked, started(tmp_path / "whole"))
    ids = whole.train()
    assert len(ids) == len(set(ids)) == 6 * seeds
    written = lines(whole.folder)
    for cut in range(len(written)):
        folder = started(tmp_path / f"cut-{cut}")
        folder.storage.write("events/000001.jsonl", b"".join(written[:cut]) + written[cut][:9])
        before = {e.data["cell"] for e in folder.events() if e.kind == "finished"}
        trained = Driver(asked, folder).train()
        assert [note.id for note in folder.cells()] == ids
        assert sorted([*before, *trained]) == sorted(ids)
        assert Search(asked, folder.events()).over


def test_a_real_sampler_goes_on_alike(tmp_path: Path) -> None:
    """The same with optuna: a study that is rebuilt from the log returns the same next point as an uninterrupted one."""
    asked = sweep(tmp_path, samples=14)

    def answers(told: Sequence[PointResult]) -> Point | None:
        return Sampler(asked.axes, asked.spec.search, "min").ask(told)

    whole = Driver(asked, started(tmp_path / "whole"), answers)
    ids = whole.train()
    folder = started(tmp_path / "cut")
    folder.storage.write("events/000001.jsonl", b"".join(lines(whole.folder)[:-3]))  # the last trial was never chosen
    assert Driver(asked, folder, answers).train() == ids[-2:]


def test_what_the_sampler_is_told(tmp_path: Path) -> None:
    """The sampler gets all points in order: their status, once all seeds have ended, and the mean of the finished seeds. A point
    with a stopped seed counts as stopped, with that seed's loss and tokens. A trial that will be retried has not ended."""
    questions: list[Sequence[PointResult]] = []

    def answers(told: Sequence[PointResult]) -> Point:
        questions.append(told)
        return rate(told)

    driver = Driver(sweep(tmp_path, seeds=2, samples=5), started(tmp_path / "s"), answers)
    cells = [str(driver.next()) for _ in range(8)]
    driver.finish(cells[0], 2.0)
    driver.finish(cells[1], 4.0)
    driver.finish(cells[2], 2.0)
    driver.finish(cells[3], 7.0, "stopped", because="asha")
    driver.finish(cells[4], 1.0)
    driver.log.event("failed", cells[5], cause="x", final=True)
    driver.log.event("failed", cells[6], cause="x", final=False)
    driver.finish(cells[7], float("nan"))
    driver.next()
    points = [note.parameters for note in driver.folder.cells()][::2]
    assert questions[-1] == [
        PointResult(points[0], "finished", 3.0, 640),
        PointResult(points[1], "stopped", 7.0, 640),
        PointResult(points[2], "finished", 1.0, 640),
        PointResult(points[3], "running"),
    ]
    driver.log.event("failed", cells[6], cause="x", final=True)
    assert driver.search._history.results(2)[3] == PointResult(points[3], "failed")


def test_a_cell_that_is_no_job(tmp_path: Path) -> None:
    """The log has it with its problem, it counts as a trial, and the others follow."""
    heads = iter([4, 5, 2])
    driver = Driver(
        sweep(tmp_path, {"heads": [2, 4, 5]}, 3, "parameter_sweep"), started(tmp_path / "s"),
        lambda told: {"model.heads": next(heads)},
    )  # fmt: skip
    assert [driver.search.next(wait=True) for _ in range(3)][2] is None
    notes = driver.folder.cells()
    assert [note.parameters["model.heads"] for note in notes] == [4, 5, 2]
    state = fold(driver.folder.events())[notes[1].id]
    assert (state.status, "does not divide width" in str(state.cause)) == ("failed", True)
    assert driver.over == [(notes[1].id, "failed")]
    assert [cell.parameters["model.heads"] for cell in driver.kept] == [4, 2]


def test_a_cell_that_is_no_job_and_a_kill(tmp_path: Path) -> None:
    """The driver was killed before it could report the problem: the next driver reports it."""
    asked, folder = sweep(tmp_path, {"heads": [2, 5]}, 1, "parameter_sweep"), started(tmp_path / "s")
    Driver(asked, folder, lambda told: {"model.heads": 5}).search.next(wait=True)
    folder.storage.write("events/000001.jsonl", lines(folder)[0])
    driver = Driver(asked, folder)
    driver.log.flush()
    (note,) = folder.cells()
    assert fold(folder.events())[note.id].status == "failed"
    assert driver.over == [(note.id, "failed")]


def test_nobody_waits_while_others_train(tmp_path: Path) -> None:
    """The sampler is asked once; until it answers there is no trial, but the search is not over."""
    pending: list[Future[Point | None]] = []

    def ask(told: Sequence[PointResult]) -> Future[Point | None]:
        pending.append(Future())
        return pending[-1]

    driver = Driver(sweep(tmp_path, samples=1), started(tmp_path / "s"), ask=ask)
    assert [driver.search.next(wait=False) for _ in range(3)] == [None] * 3
    assert (len(pending), driver.search.over) == (1, False)
    pending[0].set_result({"optim.lr": 0.5})
    assert driver.search.next(wait=False) is not None
    assert driver.search.over


def test_a_cell_that_is_stopped_has_to_end_first(tmp_path: Path) -> None:
    """After a scheduler stops a trial, the sampler is not asked until the trial has ended: else the answer would depend on
    timing. It does not wait for trials that have already ended, or that an interrupt has paused."""
    driver = Driver(sweep(tmp_path), started(tmp_path / "s"))
    first = str(driver.next())
    driver.search.released(first)
    assert [driver.search.next(wait=False) for _ in range(2)] == [None, None]
    driver.finish(first, 5.0, "stopped", because="asha")
    second = str(driver.search.next(wait=False))
    assert second == driver.folder.cells()[1].id
    driver.finish(second)
    driver.search.released(second)
    third = str(driver.search.next(wait=False))
    driver.search.released(third)
    ending = threading.Timer(0, driver.log.event, ("paused", third))
    ending.start()
    assert driver.search.next(wait=True) == driver.folder.cells()[3].id
    ending.join()


def test_storage_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No trial is returned before the log has it; it is returned once storage accepts the line."""
    driver = Driver(sweep(tmp_path), started(tmp_path / "s"))
    with monkeypatch.context() as full:

        def refuse(*_: object) -> None:
            raise StorageError("no space left", "")

        full.setattr(driver.log, "_write", refuse)
        assert [driver.search.next(wait=True) for _ in range(2)] == [None, None]
        assert driver.search.left == 6
    cell = driver.search.next(wait=True)
    assert [note.id for note in driver.folder.cells()] == [cell]


def test_all_points_have_been_tried(tmp_path: Path) -> None:
    """A grid of three points ends after three trials, with the reason: known before the start, or found by the sampler."""
    values = iter([1e-3, 1e-4, 1e-2])
    grid = Driver(
        sweep(tmp_path, {"lr": [1e-4, 1e-3, 1e-2]}, 9, "parameter_sweep"), started(tmp_path / "grid"),
        lambda told: {"optim.lr": next(values)},
    )  # fmt: skip
    assert grid.search.left == 3
    assert len(grid.train()) == 3
    assert grid.search.because == "search: the search space has only 3 points, all were tried; array.samples is 9"
    drawn = Driver(sweep(tmp_path), started(tmp_path / "drawn"), lambda told: rate(told) if len(told) < 2 else None)
    assert drawn.search.count == 6
    assert (len(drawn.train()), drawn.search.over, drawn.search.count) == (2, True, 2)
    assert drawn.search.because == "search: the search space has only 2 points, all were tried; array.samples is 6"


def test_workers_for_cells_that_are_not_known_yet(tmp_path: Path) -> None:
    """They have the resources that both ends of the search space have, unless these differ."""
    alike = Search(sweep(tmp_path), [])
    assert alike.like == alike.scouts[0].id
    assert Search(sweep(tmp_path, {**RATES, "cluster.workers": {"choice": [1, 2]}}), []).like is None


def test_the_file_may_change(tmp_path: Path) -> None:
    """More samples continue the search, fewer change nothing, missing seeds are added. A change that gives other trials is
    refused."""
    folder = started(tmp_path / "s")
    first = Driver(sweep(tmp_path, samples=3, seeds=2), folder)
    ids = first.train()
    assert len(Driver(sweep(tmp_path, samples=5, seeds=2), folder).train()) == 4
    assert [cell.id for cell in Search(sweep(tmp_path, samples=2, seeds=2), folder.events()).cells] == ids[:4]
    more = Driver(sweep(tmp_path, samples=5, seeds=3), folder)
    assert more.search.count == 15
    assert (len(more.train()), more.search.count) == (5, 15)
    assert len({note.id for note in folder.cells()}) == 15
    with pytest.raises(SpecError, match=r"was chosen with other settings"):
        Search(sweep(tmp_path, samples=5), folder.events())


def test_a_sampler_that_fails(tmp_path: Path) -> None:
    """The sweep ends with the sampler's error, and can be resumed."""

    def broken(told: Sequence[PointResult]) -> Point:
        raise RuntimeError("out of memory")

    driver = Driver(sweep(tmp_path), started(tmp_path / "s"), broken)
    with pytest.raises(TrainingStopped, match="its sampler has failed: RuntimeError: out of memory"):
        driver.search.next(wait=True)
    assert len(Driver(sweep(tmp_path), driver.folder).train()) == 6


def test_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """One error that says what to install, before anything starts."""
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "scipy" else object())
    require(SearchSpec(name="optuna"))
    with pytest.raises(UserError, match="search.name: bayes needs scipy") as caught:
        require(SearchSpec(name="bayes"))
    assert (caught.value.exit_code, caught.value.hint) == (2, 'pip install "raydist[optuna]"')


def test_events_are_plain(tmp_path: Path) -> None:
    """An `added` line reads back as the note of its trial."""
    driver = Driver(sweep(tmp_path), started(tmp_path / "s"))
    driver.next()
    (line,) = lines(driver.folder)
    assert Event.from_dict(json.loads(line)).data["note"]["tokens"] == 819_200
