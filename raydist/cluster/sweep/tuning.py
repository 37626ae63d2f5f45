"""Ray Tune's side of a sweep: a trial a cell, the cells in their order, and the scheduler, whose decisions the floor carries out.

Runs in: the driver's thread of Ray Tune, and `CellTrial` in one light actor of Ray Tune's for each cell that trains. Imports
ray.tune (1 s); never torch.

Ray Tune decides, and trains nothing itself: its actors only hand on the reports of cells. So a cell's workers outlive Ray Tune's
actors and trials, and what Ray Tune counts in is tokens, as the cell's own checkpoints do: a resumed cell goes on counting.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, MedianStoppingRule, TrialScheduler
from ray.tune.search.search_algorithm import SearchAlgorithm

from raydist.cluster.sweep.cell import Wish
from raydist.cluster.sweep.desk import NAME
from raydist.cluster.sweep.floor import Floor
from raydist.cluster.sweep.pbt import Population
from raydist.cluster.sweep.search import Search
from raydist.records import Event
from raydist.spec.sweep import Axis, SweepSpec
from raydist.spec.sweep.models import SchedulerSpec
from raydist.sweepdir import SweepLog

TIME, METRIC = "tokens", "objective"
"""What Ray Tune counts in, and judges by: keys of a cell's reports."""
_ACTOR_FAILURES = 8
"""Of a trial's actor: the cell trains on meanwhile, and the next actor goes on with its reports."""
_REDUCTION, _RUNGS = {"asha": 4.0, "hyperband": 3.0}, 3
_GRACE, _SLICES = 5, 10
_ENDLESS = 2**62
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
        self._desk = ray.get_actor(NAME)

    def step(self) -> dict[str, Any]:
        """Ray Tune's: waits for the next report."""
        return dict(ray.get(self._desk.take.remote(self._cell)))

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Ray Tune's: the actor is another cell's from now on."""
        self._cell = new_config["cell"]
        return True

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """Ray Tune's: only says whose checkpoint is meant. The floor has the cell's run make one, or copies it."""
        return {"cell": self._cell}

    def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
        """Ray Tune's: the floor has seen to it."""


class CellQueue(_Unsaved, SearchAlgorithm):
    """Gives the cells in their order, at most `at_once` at a time, each a trial of the same id, made when it is its turn.

    After them those that `search` chooses.
    """

    def __init__(
        self,
        cells: Sequence[str],
        at_once: int,
        node_ip: str,
        values: Callable[[str], Mapping[str, Any]] = lambda cell: {},
        search: Search | None = None,
    ) -> None:
        self._cells, self._at_once, self._values, self._search = iter(cells), at_once, values, search
        self._count = len(cells) + (search.left if search is not None else 0)
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
        if len(self._busy) >= self._at_once or self.is_finished():
            return None
        cell = next(self._cells, None)
        if cell is None and self._search is not None:
            cell = self._search.next(wait=not self._busy)  # while others train, Ray Tune hears what they report
            if cell is None and not self._search.over:
                return None
        if cell is None:
            self.set_finished()
            return None
        self._busy.add(cell)
        return Trial(
            self._spec["run"],
            config={"cell": cell, **self._values(cell)},
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

    def paused(self, cell: str) -> None:
        """It has given its workers back, for a while."""
        self._busy.discard(cell)


def _dirname(trial: Trial) -> str:
    return str(trial.trial_id)


class Decisions(_Unsaved, TrialScheduler):
    """A scheduler of Ray Tune's, whose decisions the floor carries out. What it decides on is in the sweep's log, to `replay`."""

    def __init__(self, scheduler: TrialScheduler, floor: Floor, log: SweepLog, queue: CellQueue) -> None:
        super().__init__()
        self.scheduler, self._floor, self._log, self._queue = scheduler, floor, log, queue
        self._logs = type(scheduler) is not FIFOScheduler
        self._replayed: dict[str, _Replayed] = {}
        self._controller: Any = None

    @property
    def metric(self) -> str | None:
        """Ray Tune's."""
        return self.scheduler.metric

    @property
    def supports_buffered_results(self) -> bool:
        """Ray Tune's."""
        return False

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        """Ray Tune's."""
        return self.scheduler.set_search_properties(metric, mode, **spec)

    def replay(self, events: Iterable[Event]) -> None:
        """Tells the scheduler what cells have reported before, so that it decides on as if nothing had been between.

        Only for those that judge a report by those before it (asha, median): the others need all their cells at the same time.
        """
        if not isinstance(self.scheduler, AsyncHyperBandScheduler | MedianStoppingRule):
            return
        for event in events:
            if event.kind == "report":
                name = event.data["cell"]
                if name not in self._replayed:
                    trial = self._replayed[name] = _Replayed(name)
                    self.scheduler.on_trial_add(None, trial)
                told = {TIME: event.data["tokens"], METRIC: event.data["value"]}
                self.scheduler.on_trial_result(None, self._replayed[name], told)

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """Ray Tune's."""
        before = self._replayed.pop(trial.trial_id, None)
        if isinstance(self.scheduler, MedianStoppingRule) and before in self.scheduler._results:
            self.scheduler._results[trial] = self.scheduler._results.pop(before)
        self.scheduler.on_trial_add(tune_controller, trial)

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        """Ray Tune's."""
        self.scheduler.on_trial_error(tune_controller, trial)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        """Ray Tune's: whether the cell goes on, stops or makes room for others."""
        cell = trial.trial_id
        if METRIC in result and self._logs:
            self._log.event("report", cell, tokens=result[TIME], step=result["step"], value=result[METRIC])
        decision = str(self.scheduler.on_trial_result(tune_controller, trial, result))
        if decision == TrialScheduler.STOP:
            self._floor.end(cell, Wish("stopped", f"{self._name} at {result[TIME]:,} tokens", at_once=True))
        elif decision in (TrialScheduler.PAUSE, TrialScheduler.NOOP):
            self._queue.paused(cell)
            self._floor.end(cell, Wish("yielded", f"{self._name} at {result[TIME]:,} tokens", at_once=False))
        return decision

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        """Ray Tune's. A cell that gave no objective tells the scheduler nothing."""
        self._controller = tune_controller
        if METRIC in result:
            self.scheduler.on_trial_complete(tune_controller, trial, result)
        else:
            self.scheduler.on_trial_remove(tune_controller, trial)

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

    def on_trial_remove(self, tune_controller: Any, trial: Trial) -> None:
        """Ray Tune's."""
        self.scheduler.on_trial_remove(tune_controller, trial)

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """Ray Tune's."""
        return self.scheduler.choose_trial_to_run(tune_controller)

    def debug_string(self) -> str:
        """Ray Tune's."""
        return str(self.scheduler.debug_string())

    @property
    def _name(self) -> str:
        return str(getattr(self.scheduler, "called", "pbt"))


class _Replayed:
    """A trial of a driver before this one, as far as schedulers look at it."""

    status = Trial.TERMINATED

    def __init__(self, trial_id: str) -> None:
        self.trial_id = trial_id


class _Closed(Exception):
    """No cell is to begin any more, and none trains."""


class _Follow(_Unsaved, tune.Callback):
    """Begins a cell when Ray Tune starts its trial, and has Ray Tune forget trials that are over."""

    def __init__(self, floor: Floor, decisions: Decisions) -> None:
        self._floor, self._decisions = floor, decisions

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self._floor.begin(trial.trial_id)

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        if self._floor.closed and not self._floor.live():
            raise _Closed  # cells that have yielded their workers to others would be waited for

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        self._decisions.forget(trials)


class _Halving(AsyncHyperBandScheduler):
    """Ray Tune's, with rungs as the file has them, for each bracket.

    A cell's bracket follows from its id, so that it is the same for the next driver. One of k rungs has reduction^k / (k + 1) of
    all cells, as in Hyperband (Li et al. 2018, algorithm 1).
    """

    def __init__(self, brackets: Sequence[Sequence[int]], reduction: float, called: str = "asha") -> None:
        super().__init__(time_attr=TIME, max_t=_ENDLESS, reduction_factor=reduction, brackets=len(brackets))
        self.called = called
        for bracket, own in zip(self._brackets, brackets, strict=True):
            bracket._rungs = [(n, {}) for n in reversed(own)]  # the last one first, as Ray Tune has them
        self._weights = [reduction ** len(own) / (len(own) + 1) for own in brackets]

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        chance = random.Random(trial.trial_id)
        (self._trial_info[trial.trial_id],) = chance.choices(self._brackets, self._weights)


class _Median(MedianStoppingRule):
    """Ray Tune's, which looks at a cell every so many tokens, and pauses none while there is too little to compare it with."""

    called = "median"

    def __init__(self, every: int, **options: Any) -> None:
        super().__init__(**options)
        self._every = every
        self._looked: dict[str, int] = {}

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        if METRIC not in result or result[TIME] - self._looked.get(trial.trial_id, 0) < self._every:
            return str(TrialScheduler.CONTINUE)
        self._looked[trial.trial_id] = result[TIME]
        return str(super().on_trial_result(tune_controller, trial, result))

    def _on_insufficient_samples(self, tune_controller: Any, trial: Trial, time: float) -> str:
        return str(TrialScheduler.CONTINUE)


def rungs(asked: SchedulerSpec, tokens: int) -> list[int]:
    """Tokens at which asha and hyperband decide, ascending, for cells that train on `tokens`."""
    if asked.rungs is not None:
        return list(asked.rungs)
    factor = asked.reduction or _REDUCTION[asked.name]
    found = (int(tokens / factor**k) for k in range(_RUNGS, 0, -1))
    return sorted({n for n in found if n >= 1})


def scheduler(spec: SweepSpec, axes: Sequence[Axis], tokens: int, floor: Floor) -> TrialScheduler:
    """What Ray Tune decides with, for cells that train on `tokens`."""
    asked = spec.scheduler
    match asked.name:
        case "asha":
            return _Halving([rungs(asked, tokens)], asked.reduction or _REDUCTION["asha"])
        case "hyperband":
            # From the one that halves most, at its first rung already, to the one that halves no cell.
            whole = rungs(asked, tokens)
            return _Halving(
                [whole[n:] for n in range(len(whole) + 1)], asked.reduction or _REDUCTION["hyperband"], "hyperband"
            )
        case "median":
            every = asked.every or tokens // _SLICES
            return _Median(every, time_attr=TIME, grace_period=asked.grace or tokens // _GRACE)
        case "pbt":
            return Population(asked, axes, tokens, TIME, floor.ready, floor.exploit)
        case _:
            return FIFOScheduler()


def fit(queue: CellQueue, decisions: Decisions, floor: Floor, scratch: Path) -> None:
    """Runs all cells; returns once Ray Tune has no more of them. In a thread of its own, whose name begins with "ray_": what Ray
    Tune prints goes to its log then. `scratch`: a folder for Ray Tune's files, which nobody reads.
    """
    with _quiet(), suppress(_Closed):
        tune.Tuner(
            CellTrial,
            # The metric is known to the scheduler already: it has had to hear of cells of earlier drivers.
            tune_config=tune.TuneConfig(search_alg=queue, scheduler=decisions, reuse_actors=True),
            run_config=tune.RunConfig(
                name="cells", storage_path=str(scratch), verbose=0, callbacks=[_Follow(floor, decisions)]
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
