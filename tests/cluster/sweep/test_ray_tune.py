"""The Ray Tune side: the order of trials, pauses, and how a rule's decisions are carried out and logged."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from ray.air._internal import usage
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from raydist.cluster.sweep import ray_tune
from raydist.cluster.sweep.paused_trials import PausedTrials
from raydist.cluster.sweep.ray_tune import METRIC, TIME, CellTrial, Decisions, TrialQueue
from raydist.cluster.sweep.schedulers import GO, STOP, TURN, Copy, Decision, Rule
from raydist.cluster.sweep.search import Search
from raydist.cluster.sweep.trial import EndRequest
from raydist.cluster.sweep.trial_runner import TrialRunner
from raydist.records import Event
from raydist.run.sweep_directory import SweepDir, SweepLog

CONTINUE, PAUSE = TrialScheduler.CONTINUE, TrialScheduler.PAUSE
CHANGES = {"optim.lr": [1e-3, 2e-3]}


class Noted:
    """A trial runner that only records its calls."""

    def __init__(self) -> None:
        self.stop_request: list[tuple[str, EndRequest]] = []
        self.exploited: list[tuple[str, str, Any]] = []
        self.begun: list[str] = []
        self.without: set[str] = set()
        """Trials without a checkpoint."""
        self.copies: list[Mapping[str, Any]] = []

    def begin(self, cell: str) -> None:
        self.begun.append(cell)

    def end(self, cell: str, end_request: EndRequest) -> None:
        self.stop_request.append((cell, end_request))

    def ready(self, cell: str) -> bool:
        return cell not in self.without

    def exploit(self, cell: str, source: str, changes: Any) -> None:
        self.exploited.append((cell, source, changes))

    def adopted(self) -> Iterator[Mapping[str, Any]]:
        while self.copies:
            yield self.copies.pop()


class PointResult(Rule):
    """Makes a given decision, once for each trial, and records its calls."""

    name = "told"

    def __init__(self, **decisions: Decision) -> None:
        self.decisions = decisions
        self.heard: list[tuple[Any, ...]] = []

    def report(self, cell: str, tokens: int, score: float) -> Decision:
        self.heard.append(("report", cell, tokens, score))
        return self.decisions.pop(cell, GO)

    def copied(self, cell: str, tokens: int, changes: Any) -> None:
        self.heard.append(("copied", cell, tokens, changes))

    def over(self, cell: str) -> None:
        self.heard.append(("over", cell))


class Sweep:
    """Decisions between a rule, a trial runner that records its calls, and a real log."""

    def __init__(self, folder: Path, rule: Rule | None, left: int = 0, room: int = 0) -> None:
        self.folder, self.trial_runner, self.log = SweepDir(folder), Noted(), SweepLog(SweepDir(folder))
        self.queue = TrialQueue([f"new-{n}" for n in range(left)], room, "10.0.0.1")
        self.decisions = Decisions(rule, "min", cast(TrialRunner, self.trial_runner), self.log, self.queue)

    def report(self, name: str, tokens: int, value: float | None = None) -> str:
        """A report of a running trial."""
        told = {TIME: tokens, "step": 1} | ({} if value is None else {METRIC: value})
        return self.decisions.on_trial_result(None, trial(name), told)

    def events(self) -> list[Event]:
        self.log.flush()
        return self.folder.events()


def trial(name: str, status: str = Trial.RUNNING) -> Any:
    """Ray Tune's trial, with the attributes that are used."""
    return SimpleNamespaceWithHash(trial_id=name, status=status)


class SimpleNamespaceWithHash(SimpleNamespace):
    """Hashed by identity, as Ray Tune's trials are."""

    __hash__ = object.__hash__


def test_cells_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time, each created when there is room, by its id. One that has ended or is paused makes room; the queue knows how
    many are left."""
    queue = TrialQueue(["a", "b", "c", "d", "e"], 2, "10.0.0.1")
    made: list[str] = []
    monkeypatch.setattr(
        "raydist.cluster.sweep.ray_tune.Trial", lambda *_, **told: made.append(told["trial_id"]) or told
    )
    queue.add_configurations([SimpleNamespace(spec={"run": "x", "storage": None, "checkpoint_config": None})])
    assert [queue.next_trial() is not None for _ in range(3)] == [True, True, False]
    assert (queue.left, queue.room) == (3, 0)
    queue.on_trial_complete("a")
    queue.next_trial()
    queue.paused("c")
    queue.next_trial()
    assert made == ["a", "b", "c", "d"]
    assert not queue.resumes("c")
    queue.on_trial_complete("b")
    assert queue.resumes("c")
    assert queue.resumes("c"), "the room is kept for it"
    assert queue.next_trial() is None
    queue.on_trial_complete("c")
    assert queue.next_trial() is not None
    queue.on_trial_complete("d")
    assert queue.next_trial() is None
    assert queue.is_finished()
    assert queue.left == 0


def test_turns() -> None:
    """The paused trial with the fewest tokens resumes first; of equal ones, the one paused first. A trial that does not have the
    status PAUSED yet is skipped."""
    turns = PausedTrials()
    a, b, c, d = (trial(name, Trial.PAUSED) for name in "abcd")
    for waiting, tokens in ((a, 200), (b, 100), (c, 100)):
        turns.wait(waiting, tokens)
    assert turns.first() is b
    b.status = Trial.RUNNING
    assert turns.first() is c
    turns.leave(c)
    turns.leave(d)
    assert turns.first() is a
    b.status = Trial.PENDING
    assert turns.first() is b
    turns.leave(b)
    turns.leave(a)
    assert (turns.first(), len(turns)) == (None, 0)


def test_cells_of_a_search_come_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials that were chosen before come first. While one is being chosen there is no trial, but the queue is not finished; Ray
    Tune waits for it only if no trial trains."""

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

    monkeypatch.setattr("raydist.cluster.sweep.ray_tune.Trial", lambda *_, **told: told["trial_id"])
    queue = TrialQueue(["a"], 2, "10.0.0.1", search=cast(Search, Chosen()))
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


def test_a_stop_is_carried_out_and_written_down(tmp_path: Path) -> None:
    """The trial is ended at once, for good. Every report is in the log, and the rule gets its score, for which more is better."""
    rule = PointResult(bad=STOP)
    sweep = Sweep(tmp_path, rule)
    assert [sweep.report("good", 1100, 1.0), sweep.report("bad", 1200, 2.0)] == [CONTINUE, TrialScheduler.STOP]
    assert sweep.trial_runner.stop_request == [("bad", EndRequest("stopped", "told at 1,200 tokens", at_once=True))]
    assert rule.heard == [("report", "good", 1100, -1.0), ("report", "bad", 1200, -2.0)]
    reports = [(e.kind, e.data["cell"], e.data["tokens"], e.data["value"]) for e in sweep.events()]
    assert reports == [("report", "good", 1100, 1.0), ("report", "bad", 1200, 2.0)]


def test_without_a_rule(tmp_path: Path) -> None:
    """Every trial continues, and its reports are not logged; the same holds for a report without the objective."""
    sweep = Sweep(tmp_path, None)
    sweep.decisions.replay([Event("report", 0.0, {"cell": "a", "tokens": 1, "value": 1.0})])
    assert sweep.report("a", 100, 1.0) == CONTINUE
    sweep.decisions.on_trial_complete(None, trial("a"), {})
    rule = PointResult(a=STOP)
    assert Sweep(tmp_path, rule).report("a", 100) == CONTINUE
    assert (sweep.events(), rule.heard) == ([], [])


def test_turns_are_taken_where_others_wait(tmp_path: Path) -> None:
    """A trial yields its workers, after a checkpoint, to one that has not started or that waits; not while there is room for
    all."""
    for left, room, expected in ((0, 0, CONTINUE), (1, 0, PAUSE), (1, 1, CONTINUE), (2, 1, PAUSE)):
        sweep = Sweep(tmp_path, PointResult(a=TURN), left=left, room=room)
        assert sweep.report("a", 100, 1.0) == expected, (left, room)
        yields = [("a", EndRequest("yielded", "told at 100 tokens", at_once=False))]
        assert sweep.trial_runner.stop_request == (yields if expected == PAUSE else [])
    sweep = Sweep(tmp_path, PointResult(a=TURN, b=TURN, c=TURN), left=1)
    cells = {name: trial(name) for name in "abc"}
    for name, tokens in (("a", 200), ("b", 100)):
        sweep.decisions.on_trial_result(None, cells[name], {TIME: tokens, METRIC: 1.0, "step": 1})
        cells[name].status = Trial.PAUSED
    assert sweep.decisions.choose_trial_to_run(None) is None, "there is no room"
    sweep.queue._at_once = 1
    assert sweep.decisions.choose_trial_to_run(None) is cells["b"]
    assert sweep.decisions.choose_trial_to_run(None) is cells["b"], "until it has started"
    sweep.decisions.started(cells["b"])
    assert sweep.trial_runner.begun == ["b"]
    assert sweep.decisions.choose_trial_to_run(None) is None
    sweep.decisions.on_trial_remove(None, cells["a"])
    assert len(sweep.decisions._paused) == 0
    sweep.queue.on_trial_complete("b")
    assert sweep.decisions.choose_trial_to_run(None) is None
    assert sweep.queue.resumes("c")
    assert sweep.queue.room == 0
    sweep.decisions.on_trial_result(None, cells["c"], {TIME: 100, METRIC: 1.0, "step": 1})
    assert sweep.queue.room == 1, "it has given its place back"
    assert len(sweep.decisions._paused) == 1
    sweep.decisions.on_trial_error(None, cells["c"])
    assert len(sweep.decisions._paused) == 0, "it is not waited for"


def test_a_copy(tmp_path: Path) -> None:
    """The trial runner continues the trial from the other one's checkpoint; the rule is informed after the copy, before the next
    report."""
    rule = PointResult(worse=Copy("better", CHANGES))
    sweep = Sweep(tmp_path, rule, room=1)
    assert sweep.report("worse", 100, 9.0) == PAUSE
    assert sweep.trial_runner.exploited == [("worse", "better", CHANGES)]
    assert sweep.trial_runner.stop_request == []
    sweep.trial_runner.copies.append({"cell": "worse", "source": "better", "step": 2, "tokens": 90, "changes": CHANGES})
    sweep.report("worse", 120, 1.0)
    assert rule.heard[1:] == [("copied", "worse", 90, CHANGES), ("report", "worse", 120, -1.0)]


def test_the_last_report_decides_nothing(tmp_path: Path) -> None:
    """A trial that ends by itself is not stopped, paused, or restarted from another checkpoint; the rule still gets the
    report."""
    rule = PointResult(a=STOP, b=TURN, c=Copy("a", CHANGES))
    sweep = Sweep(tmp_path, rule, left=1)
    for name in "abc":
        told = {TIME: 100, METRIC: 1.0, "step": 1, "last": True}
        assert sweep.decisions.on_trial_result(None, trial(name), told) == CONTINUE
    assert (sweep.trial_runner.stop_request, sweep.trial_runner.exploited) == ([], [])
    assert [heard[1] for heard in rule.heard] == ["a", "b", "c"]
    assert len(sweep.events()) == 3


def test_a_copy_of_nothing(tmp_path: Path) -> None:
    """If the source has no checkpoint yet, the trial continues unchanged, or yields its workers."""
    for left, expected in ((0, CONTINUE), (1, PAUSE)):
        sweep = Sweep(tmp_path, PointResult(worse=Copy("better", CHANGES)), left=left)
        sweep.trial_runner.without.add("better")
        assert sweep.report("worse", 100, 9.0) == expected
        assert sweep.trial_runner.exploited == []


def test_a_cell_that_is_over(tmp_path: Path) -> None:
    """The rule is informed of its end, whether or not it had an objective."""
    rule = PointResult()
    sweep = Sweep(tmp_path, rule)
    sweep.decisions.on_trial_complete(None, trial("a"), {})
    assert rule.heard == [("over", "a")]


def test_a_driver_that_takes_over(tmp_path: Path) -> None:
    """The rule gets the log: reports, copies, and last which trials have ended."""
    rule = PointResult()
    events = [
        Event("finished", 0.0, {"cell": "a"}),
        Event("report", 0.0, {"cell": "a", "tokens": 100, "value": None}),
        Event("exploited", 0.0, {"cell": "b", "source": "a", "step": 1, "tokens": 90, "changes": CHANGES}),
        Event("failed", 0.0, {"cell": "c", "final": False}),
        Event("failed", 0.0, {"cell": "d", "final": True}),
        Event("stopped", 0.0, {"cell": "e"}),
        Event("paused", 0.0, {"cell": "f"}),
    ]
    Sweep(tmp_path, rule).decisions.replay(events)
    assert rule.heard == [
        ("report", "a", 100, float("-inf")),
        ("copied", "b", 90, CHANGES),
        ("over", "a"),
        ("over", "d"),
        ("over", "e"),
    ]


def test_trials_are_the_cells_reports() -> None:
    """Ray Tune can reuse the actor of one trial for another."""
    made = CellTrial.__new__(CellTrial)
    made._trial_id = "a"
    assert made.reset_config({"cell": "b"})
    assert made.save_checkpoint("") == {"cell": "b"}


def test_ray_s_statistics_import_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Ray Tune would count callbacks of wandb and mlflow, as it does again after the sweep."""
    counted: list[object] = []
    monkeypatch.setattr(usage, "_count_callbacks", lambda callbacks: counted.append(callbacks) or {})
    tune = importlib.import_module("ray.tune.tune")
    with ray_tune._quiet():
        tune.air_usage.tag_callbacks(["during"])
    tune.air_usage.tag_callbacks(["after"])
    assert counted == [["after"]]


def test_a_trial_s_actor_has_no_runtime_environment() -> None:
    """With one, Ray cannot have its process forked. After the sweep Ray Tune's actors have theirs again."""
    execution = importlib.import_module("ray.tune.execution.class_cache")

    def environment() -> Mapping[str, Any]:
        return dict(execution._ActorClassCache().get(CellTrial)._default_options["runtime_env"] or {})

    with ray_tune._quiet():
        assert not environment().get("env_vars")
    assert environment()["env_vars"]["PL_DISABLE_FORK"] == "1"
