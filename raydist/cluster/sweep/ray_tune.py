"""Ray Tune's side of a sweep: a trial a cell, the cells in their order, and what the rule decides, for the trial runner to carry
out.

Runs in: the driver's thread of Ray Tune, and `CellTrial` in one light actor of Ray Tune's for each cell that trains. Imports
ray.tune (1 s); never torch.

Ray Tune asks for trials, stops and pauses them, and trains nothing itself: its actors only hand on the reports of cells. So a
cell's workers outlive Ray Tune's actors and trials, and what is counted in is tokens, as the cell's own checkpoints do: a resumed
cell goes on counting.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import ray
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler
from ray.tune.search.search_algorithm import SearchAlgorithm

from raydist.cluster.sweep.paused_trials import PausedTrials
from raydist.cluster.sweep.report_queue import NAME
from raydist.cluster.sweep.schedulers import GO, Copy, Rule, Stop, Turn, replay, score
from raydist.cluster.sweep.search import Search
from raydist.cluster.sweep.trial import EndRequest
from raydist.cluster.sweep.trial_runner import TrialRunner
from raydist.records import Event
from raydist.run.sweep_directory import SweepLog

TIME, METRIC = "tokens", "objective"
"""What is counted in, and what is judged by: keys of a cell's reports."""
_UNSETTLED = 500
"""Trials that wait, and that a full garbage collection goes through: a millisecond or two."""
_ACTOR_FAILURES = 8
"""Of a trial's actor: the cell trains on meanwhile, and the next actor goes on with its reports."""
_QUIET = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # results in JSON, CSV and TensorBoard: each run of raydist has its own
    "TUNE_GLOBAL_CHECKPOINT_S": "1e9",  # of Ray Tune's own state: the sweep's event log is the truth
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a cell that failed has no objective
    "TUNE_WARN_THRESHOLD_S": "1e9",
    "TUNE_WARN_INSUFFICENT_RESOURCE_THRESHOLD_S": "1e9",
    "TUNE_WARN_INSUFFICENT_RESOURCE_THRESHOLD_S_AUTOSCALER": "1e9",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_FORCE_TRIAL_CLEANUP_S": "5",
}


class _Unsaved:
    """What is pickled empty: Ray Tune writes down all that it is given, to restore a sweep that way; ours has its own."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class CellTrial(tune.Trainable):
    """A cell, as Ray Tune sees it: every step is the next report of it."""

    def setup(self, config: dict[str, Any]) -> None:
        """Ray Tune's: `config` has the cell's id."""
        self._cell = config["cell"]
        self._report_queue = ray.get_actor(NAME)

    def step(self) -> dict[str, Any]:
        """Ray Tune's: waits for the next report."""
        return dict(ray.get(self._report_queue.take.remote(self._cell)))

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Ray Tune's: the actor is another cell's from now on."""
        self._cell = new_config["cell"]
        return True

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """Ray Tune's: only says whose checkpoint is meant. The trial runner has the cell's run make one, or copies it."""
        return {"cell": self._cell}

    def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
        """Ray Tune's: the trial runner has seen to it."""


class CellQueue(_Unsaved, SearchAlgorithm):
    """Gives the cells in their order, at most `at_once` at a time, each a trial of the same id, made when it is its turn.

    After them those that `search` chooses.
    """

    def __init__(self, cells: Sequence[str], at_once: int, node_ip: str, search: Search | None = None) -> None:
        self._cells, self._at_once, self._search = iter(cells), at_once, search
        self._known = len(cells)
        """Of the first kind, those that have no trial yet."""
        self._count = self.left
        self._busy: set[str] = set()
        # Ray Tune takes no trial without a resource. This one pins its actor to the driver's node, and takes nothing from cells.
        self._resources = tune.PlacementGroupFactory([{f"node:{node_ip}": 0.0001}])
        self._spec: Mapping[str, Any] = {}

    @property
    def total_samples(self) -> int:
        """Ray Tune's."""
        return self._count

    def add_configurations(self, experiments: Any) -> None:
        """Ray Tune's: of the one experiment, where trials keep their files."""
        (experiment,) = experiments
        self._spec = experiment.spec

    def next_trial(self) -> Trial | None:
        """Ray Tune's: the next cell, None if there is no room for one."""
        if self.room <= 0 or self.is_finished():
            return None
        cell = next(self._cells, None)
        if cell is not None:
            self._known -= 1
        elif self._search is not None:
            cell = self._search.next(wait=not self._busy)  # while others train, Ray Tune hears what they report
            if cell is None and not self._search.over:
                return None
        if cell is None:
            self.set_finished()
            return None
        self._busy.add(cell)
        return Trial(
            self._spec["run"],
            config={"cell": cell},
            trial_id=cell,
            experiment_tag=cell,
            storage=self._spec["storage"],
            checkpoint_config=self._spec["checkpoint_config"],
            placement_group_factory=self._resources,
            trial_dirname_creator=_dirname,
            max_failures=_ACTOR_FAILURES,
        )

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        """Ray Tune's: there is room again."""
        self._busy.discard(trial_id)
        if self._search is not None:
            self._search.released(trial_id)

    @property
    def left(self) -> int:
        """Cells that have no trial yet: so many, or at most so many of a search."""
        return self._known + (self._search.left if self._search is not None else 0)

    @property
    def room(self) -> int:
        """For so many cells more."""
        return self._at_once - len(self._busy)

    def paused(self, cell: str) -> None:
        """It gives its workers back, for a while."""
        self._busy.discard(cell)

    def resumes(self, cell: str) -> bool:
        """Whether there is room for it to train again; if so it is kept for it."""
        if cell not in self._busy and self.room <= 0:
            return False
        self._busy.add(cell)
        return True


def _dirname(trial: Trial) -> str:
    return str(trial.trial_id)


class Decisions(_Unsaved, TrialScheduler):
    """A scheduler to Ray Tune: what the rule decides it has the trial runner carry out, and the rule is told what the log has
    (`replay`).

    `better`: which objective is, min or max. Without a rule every cell trains to its end.
    """

    def __init__(
        self,
        rule: Rule | None,
        better: Literal["min", "max"],
        trial_runner: TrialRunner,
        log: SweepLog,
        queue: CellQueue,
    ) -> None:
        super().__init__()
        self._rule, self._better, self._trial_runner, self._log, self._queue = rule, better, trial_runner, log, queue
        self._turns, self._settled = PausedTrials(), 0
        self._controller: Any = None

    @property
    def supports_buffered_results(self) -> bool:
        """Ray Tune's."""
        return False

    def replay(self, events: Iterable[Event]) -> None:
        """Tells the rule what was before, so that it decides on as if nothing had been between."""
        if self._rule is not None:
            replay(self._rule, events, self._better)

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """Ray Tune's: a trial that is new starts by itself."""

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        """Ray Tune's: of a trial's actor, not of the cell. It starts again by itself."""
        self._turns.leave(trial)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        """Ray Tune's: whether the cell goes on, stops or makes room for others."""
        if self._rule is None or METRIC not in result:
            return str(TrialScheduler.CONTINUE)
        cell, tokens, value = trial.trial_id, result[TIME], result[METRIC]
        for copied in self._trial_runner.adopted():
            self._rule.copied(copied["cell"], copied["tokens"], copied["changes"])
        self._log.event("report", cell, tokens=tokens, step=result["step"], value=value)
        because = f"{self._rule.name} at {tokens:,} tokens"
        decision = self._rule.report(cell, tokens, score(value, self._better))
        # A cell that has come to its end is neither stopped there nor kept from it.
        match GO if result.get("last") else decision:
            case Stop():
                self._trial_runner.end(cell, EndRequest("stopped", because, at_once=True))
                return str(TrialScheduler.STOP)
            case Copy(source, changes) if self._trial_runner.ready(source):
                self._trial_runner.exploit(cell, source, changes)
            case Turn() | Copy() if self._queue.left + len(self._turns) > self._queue.room:
                self._trial_runner.end(cell, EndRequest("yielded", because, at_once=False))
            case _:
                return str(TrialScheduler.CONTINUE)
        self._queue.paused(cell)
        self._turns.wait(trial, tokens)
        self._settle()
        return str(TrialScheduler.PAUSE)

    def _settle(self) -> None:
        """Has garbage collections pass by trials that wait for their turn: of those there may be thousands, each for long."""
        if len(self._turns) >= self._settled + _UNSETTLED:
            self._settled = len(self._turns)
            gc.collect()
            gc.freeze()

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        """Ray Tune's: the cell is over."""
        self._controller = tune_controller
        if self._rule is not None:
            self._rule.over(trial.trial_id)

    def on_trial_remove(self, tune_controller: Any, trial: Trial) -> None:
        """Ray Tune's: the same of one that waited."""
        self._turns.leave(trial)
        self.on_trial_complete(tune_controller, trial, {})

    def forget(self, trials: list[Trial]) -> None:
        """Takes the trials that are over from Ray Tune's own list, `trials`, and from its memory.

        It goes through that list at every step, and would keep all of 10,000 cells until the end.
        """
        if any(trial.is_finished() for trial in trials):
            trials[:] = [trial for trial in trials if not trial.is_finished()]
        if self._controller is not None:
            for kept in (self._controller._stopped_trials, self._controller._failed_trials):
                self._controller._trials_to_cache -= kept
                kept.clear()

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """Ray Tune's: of the trials that were paused, while there is room, that of the cell trained least."""
        trial = self._turns.first()
        return trial if trial is not None and self._queue.resumes(trial.trial_id) else None

    def started(self, trial: Trial) -> None:
        """Its cell begins."""
        self._turns.leave(trial)
        self._trial_runner.begin(trial.trial_id)

    def debug_string(self) -> str:
        """Ray Tune's."""
        return "none" if self._rule is None else self._rule.name


class _Closed(Exception):
    """No cell is to begin any more, and none trains."""


class _Follow(_Unsaved, tune.Callback):
    """Begins a cell when Ray Tune starts its trial, and has Ray Tune forget trials that are over."""

    def __init__(self, trial_runner: TrialRunner, decisions: Decisions) -> None:
        self._trial_runner, self._decisions = trial_runner, decisions

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self._decisions.started(trial)

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        if self._trial_runner.closed and not self._trial_runner.live():
            raise _Closed  # cells that have yielded their workers to others would be waited for

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        self._decisions.forget(trials)


def fit(queue: CellQueue, decisions: Decisions, trial_runner: TrialRunner, scratch: Path) -> None:
    """Runs all cells; returns once Ray Tune has no more of them. In a thread of its own, whose name begins with "ray_": what Ray
    Tune prints goes to its log then. `scratch`: a folder for Ray Tune's files, which nobody reads.
    """
    with _quiet(), suppress(_Closed):
        tune.Tuner(
            CellTrial,
            # The metric is known to the scheduler already: it has had to hear of cells of earlier drivers.
            tune_config=tune.TuneConfig(search_alg=queue, scheduler=decisions, reuse_actors=True),
            run_config=tune.RunConfig(
                name="cells", storage_path=str(scratch), verbose=0, callbacks=[_Follow(trial_runner, decisions)]
            ),
        ).fit()


@contextmanager
def _quiet() -> Iterator[None]:
    # It would tell the user of its own files, which nobody reads; what it decides stands in the sweep's log, and errors are raised.
    logger = logging.getLogger("ray.tune")
    logger.handlers, logger.propagate = [logging.NullHandler()], False
    before = {name: os.environ.get(name) for name in _QUIET}
    os.environ.update(_QUIET)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
