"""What Ray Tune is given: cells in their order, rungs in tokens, and what cells reported to an earlier driver."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from ray.tune.experiment import Trial
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, TrialScheduler

from raydist.cluster.sweep.cell import Wish
from raydist.cluster.sweep.floor import Floor
from raydist.cluster.sweep.pbt import Population
from raydist.cluster.sweep.search import Search
from raydist.cluster.sweep.tuning import METRIC, TIME, CellQueue, CellTrial, Decisions, rungs, scheduler
from raydist.records import Event
from raydist.spec.sweep import Axis, SweepSpec
from raydist.sweepdir import SweepDir, SweepLog


def spec(**scheduler: Any) -> SweepSpec:
    """A sweep with that scheduler."""
    array = {"parameters": [{"learning_rate": [1e-3]}]}
    return SweepSpec.model_validate({"base": "b.yaml", "array": array, "scheduler": scheduler})


class Noted:
    """A floor that only notes what it is told."""

    closed = False

    def __init__(self) -> None:
        self.wishes: list[tuple[str, Wish]] = []
        self.exploited: list[tuple[str, str, Any]] = []

    def end(self, cell: str, wish: Wish) -> None:
        self.wishes.append((cell, wish))

    def ready(self, cell: str) -> bool:
        return True

    def exploit(self, cell: str, source: str, changes: Any) -> None:
        self.exploited.append((cell, source, changes))


def decisions(asked: SweepSpec, tmp_path: Path) -> tuple[Decisions, Noted, SweepLog, CellQueue]:
    """The scheduler, wired to a floor that notes, and to a real log."""
    floor, log = Noted(), SweepLog(SweepDir(tmp_path))
    queue = CellQueue([], 1, "10.0.0.1")
    made = scheduler(asked, [], 6400, cast(Floor, floor))
    made.set_search_properties(METRIC, "min")
    return Decisions(made, cast(Floor, floor), log, queue), floor, log, queue


def trial(name: str) -> Any:
    """A cell's trial, as far as asha looks at it."""
    return SimpleNamespace(trial_id=name, status=Trial.RUNNING)


def test_cells_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time, each made when it is its turn, by its id; one that is over, or has yielded, makes room."""
    queue = CellQueue(["a", "b", "c", "d"], 2, "10.0.0.1")
    made: list[str] = []
    monkeypatch.setattr("raydist.cluster.sweep.tuning.Trial", lambda *_, **told: made.append(told["trial_id"]) or told)
    queue.add_configurations([SimpleNamespace(spec={"run": "x", "storage": None, "checkpoint_config": None})])
    assert [queue.next_trial() is not None for _ in range(3)] == [True, True, False]
    queue.on_trial_complete("a")
    queue.next_trial()
    queue.paused("c")
    queue.next_trial()
    assert made == ["a", "b", "c", "d"]
    queue.on_trial_complete("b")
    assert queue.next_trial() is None
    assert queue.is_finished()


def test_cells_of_a_search_come_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were chosen before first. While one is being chosen there is no trial, and that is no end; Ray Tune waits for it
    only if nothing trains."""

    class Chosen:
        left, over = 2, False
        answers: ClassVar = [None, "b", None, "c"]
        waited: ClassVar[list[bool]] = []
        gone: ClassVar[list[str]] = []

        def next(self, wait: bool) -> str | None:
            self.waited.append(wait)
            answer = self.answers.pop(0) if self.answers else None
            self.over = not self.answers
            return answer

        def released(self, cell: str) -> None:
            self.gone.append(cell)

    monkeypatch.setattr("raydist.cluster.sweep.tuning.Trial", lambda *_, **told: told["trial_id"])
    queue = CellQueue(["a"], 2, "10.0.0.1", search=cast(Search, Chosen()))
    queue.add_configurations([SimpleNamespace(spec={"run": "x", "storage": None, "checkpoint_config": None})])
    assert queue.total_samples == 3
    assert [queue.next_trial() for _ in range(4)] == ["a", None, "b", None]
    queue.on_trial_complete("a")
    queue.on_trial_complete("b")
    assert [queue.next_trial() for _ in range(2)] == [None, "c"]
    assert Chosen.waited == [False, False, True, True]
    assert Chosen.gone == ["a", "b"]
    assert not queue.is_finished()
    assert queue.next_trial() is None
    assert queue.is_finished()


def test_rungs() -> None:
    """Those of the file; else the cell's tokens over the reduction, three times at most, never less than one token."""
    assert rungs(spec(name="asha", rungs=[10, 20]).scheduler, 100) == [10, 20]
    assert rungs(spec(name="asha").scheduler, 6400) == [100, 400, 1600]
    assert rungs(spec(name="asha", reduction=10).scheduler, 50) == [5]
    made = scheduler(spec(name="asha", rungs=[128, 300]), [], 6400, cast(Floor, Noted()))
    assert isinstance(made, AsyncHyperBandScheduler)
    assert [[n for n, _ in bracket._rungs] for bracket in made._brackets] == [[300, 128]]
    assert type(scheduler(spec(name="none"), [], 6400, cast(Floor, Noted()))) is FIFOScheduler


def test_hyperband_has_brackets() -> None:
    """One that halves at every rung, one that halves no cell; cells are spread over them as Hyperband does, by their ids alone."""
    made = [scheduler(spec(name="hyperband", rungs=[100, 300]), [], 900, cast(Floor, Noted())) for _ in range(2)]
    for scheduled in made:
        assert isinstance(scheduled, AsyncHyperBandScheduler)
        for number in range(3000):
            scheduled.on_trial_add(None, trial(f"cell-{number}"))
    first, second = cast(Any, made)
    assert [[n for n, _ in bracket._rungs] for bracket in first._brackets] == [[300, 100], [300], []]
    where = [[s._brackets.index(s._trial_info[f"cell-{n}"]) for n in range(3000)] for s in (first, second)]
    assert where[0] == where[1]
    counts = [where[0].count(n) for n in range(3)]
    assert counts == pytest.approx([3000 * w / 5.5 for w in (3.0, 1.5, 1.0)], rel=0.15)


def test_a_stop_is_carried_out_and_written_down(tmp_path: Path) -> None:
    """The worse of two at a rung is ended at once, for good; each report on the way is in the log."""
    made, floor, log, _ = decisions(spec(name="asha", rungs=[100], reduction=2), tmp_path)
    good, bad = trial("good"), trial("bad")
    for cell, tokens, value in ((good, 100, 1.0), (bad, 50, 9.0), (bad, 100, 2.0)):
        if tokens != 100 or cell is good:
            made.on_trial_add(None, cell)
        told = {TIME: tokens, METRIC: value, "step": 1}
        decision = made.on_trial_result(None, cell, told)
    assert decision == TrialScheduler.STOP
    assert floor.wishes == [("bad", Wish("stopped", "asha at 100 tokens", at_once=True))]
    log.flush()
    reports = [(e.data["cell"], e.data["tokens"], e.data["value"]) for e in SweepDir(tmp_path).events()]
    assert reports == [("good", 100, 1.0), ("bad", 50, 9.0), ("bad", 100, 2.0)]


def test_a_driver_that_takes_over_decides_alike(tmp_path: Path) -> None:
    """What cells reported to the driver before counts at the rungs; a cell that had passed one is not judged there again."""
    made, floor, _, _ = decisions(spec(name="asha", rungs=[100], reduction=2), tmp_path)
    told = [("good", 100, 1.0), ("also", 100, 0.5)]
    made.replay([Event("report", 0.0, {"cell": c, "tokens": t, "value": v}) for c, t, v in told])
    back, bad = trial("good"), trial("bad")
    for cell in (back, bad):
        made.on_trial_add(None, cell)
    assert made.on_trial_result(None, back, {TIME: 120, METRIC: 3.0, "step": 1}) == TrialScheduler.CONTINUE
    assert made.on_trial_result(None, bad, {TIME: 100, METRIC: 0.9, "step": 1}) == TrialScheduler.STOP
    assert [cell for cell, _ in floor.wishes] == ["bad"]


def test_median_takes_over_too(tmp_path: Path) -> None:
    """Three replayed cells are the median that a fourth is worse than; one of them goes on under its own name."""
    made, floor, _, _ = decisions(spec(name="median", grace=10, every=20), tmp_path)
    made.replay([Event("report", 0.0, {"cell": c, "tokens": 100, "value": 1.0}) for c in "abc"])
    back, bad = Trial("x", trial_id="a", stub=True), Trial("x", trial_id="d", stub=True)
    for cell in (back, bad):
        made.on_trial_add(None, cell)
    assert made.on_trial_result(None, back, {TIME: 120, METRIC: 1.0, "step": 1}) == TrialScheduler.CONTINUE
    assert made.on_trial_result(None, bad, {TIME: 19, METRIC: 5.0, "step": 1}) == TrialScheduler.CONTINUE
    assert made.on_trial_result(None, bad, {TIME: 100, METRIC: 5.0, "step": 1}) == TrialScheduler.STOP
    assert [cell for cell, _ in floor.wishes] == ["d"]


def test_perturbed_values_stay_inside() -> None:
    """pbt: a value times 1.25 ends at the range's edge, whole numbers stay whole, and the trial stays its own cell's."""
    axes = [Axis("lr", "optim.lr", "log_uniform", low=1e-4, high=1e-2), Axis("n", "n", "int_uniform", low=1, high=8)]
    asked = spec(name="pbt", perturb=[1.25, 1.25], resample=0).scheduler
    made = Population(asked, axes, 1000, TIME, lambda cell: True, lambda *_: None)
    config = {"cell": "best", "optim.lr": 9e-3, "n": 3}
    found, _ = made._get_new_config(
        cast(Trial, SimpleNamespace(trial_id="worst")), cast(Trial, SimpleNamespace(config=config))
    )
    assert found == {"cell": "worst", "optim.lr": 1e-2, "n": 4}
    assert made._perturbation_interval == 100


def test_trials_are_the_cells_reports() -> None:
    """Ray Tune's actor can be another cell's from one moment to the next."""
    made = CellTrial.__new__(CellTrial)
    made._cell = "a"
    assert made.reset_config({"cell": "b"})
    assert made.save_checkpoint("") == {"cell": "b"}
