"""The adapter between a sweep and Ray Tune: a search algorithm that gives the trials, and a scheduler that asks the rule.

Runs in: the driver's thread of Ray Tune, and `CellTrial` in one zero-CPU actor of Ray Tune for each running trial. Imports
ray.tune (1 s); never torch.

Ray Tune asks for trials, stops and pauses them. It trains nothing: its actors only pass on the trials' reports. So the workers of
a trial outlive Ray Tune's actors. Progress is counted in tokens, as in the trial's own checkpoints, so a resumed trial continues
its count. An id (`trial_id`) is the same for the trial, its run ("cell" in events) and Ray Tune's `Trial`.
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
from ray.tune.search import SearchAlgorithm

from raydist.cluster.ray_private import air_usage, class_cache
from raydist.cluster.sweep.paused_trials import PausedTrials
from raydist.cluster.sweep.report_queue import NAME
from raydist.cluster.sweep.schedulers import GO, Copy, Rule, Stop, Turn, replay, score
from raydist.cluster.sweep.search import Search
from raydist.cluster.sweep.trial import EndRequest
from raydist.cluster.sweep.trial_runner import TrialRunner
from raydist.records import Event
from raydist.run.sweep_directory import SweepLog

TIME, METRIC = "tokens", "objective"
"""Keys of a trial's reports: its progress, and its score."""
_FREEZE_EVERY = 500
"""Paused trials between two calls of gc.freeze: a full garbage collection takes 1 to 2 ms for so many."""
_ACTOR_FAILURES = 8
"""Restarts of a trial's actor: the trial itself keeps training, and the next actor takes its further reports."""
_QUIET = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # results in JSON, CSV and TensorBoard: each run writes its own
    "TUNE_GLOBAL_CHECKPOINT_S": "1e9",  # snapshots of Ray Tune's state: the sweep is restored from its event log
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a failed trial has no objective
    "TUNE_WARN_THRESHOLD_S": "1e9",
    "TUNE_WARN_INSUFFICENT_RESOURCE_THRESHOLD_S": "1e9",
    "TUNE_WARN_INSUFFICENT_RESOURCE_THRESHOLD_S_AUTOSCALER": "1e9",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_FORCE_TRIAL_CLEANUP_S": "5",
}


class _Unsaved:
    """Pickles as empty: Ray Tune saves these objects to restore a sweep, which is restored from its event log instead."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class CellTrial(tune.Trainable):
    """Ray Tune's trainable of a trial: each step returns the trial's next report."""

    def setup(self, config: dict[str, Any]) -> None:
        """Ray Tune's: `config` has the trial's id."""
        self._trial_id = config["cell"]
        self._report_queue = ray.get_actor(NAME)

    def step(self) -> dict[str, Any]:
        """Ray Tune's: waits for the next report."""
        return dict(ray.get(self._report_queue.take.remote(self._trial_id)))

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Ray Tune's: the actor is reused for another trial."""
        self._trial_id = new_config["cell"]
        return True

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """Ray Tune's: returns only the trial's id. The trial's run saves real checkpoints; the trial runner copies them."""
        return {"cell": self._trial_id}

    def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
        """Ray Tune's: nothing to do, see `save_checkpoint`."""


class TrialQueue(_Unsaved, SearchAlgorithm):
    """Gives Ray Tune the trials in their order, at most `at_once` at a time, then those that `search` chooses.

    Each Ray Tune trial has the same id, and is created only when it may start.
    """

    def __init__(self, trial_ids: Sequence[str], at_once: int, node_ip: str, search: Search | None = None) -> None:
        self._trial_ids, self._at_once, self._search = iter(trial_ids), at_once, search
        self._known = len(trial_ids)
        """How many of `trial_ids` are not created yet."""
        self._count = self.left
        self._busy: set[str] = set()
        # Ray Tune needs a resource for each trial. This one pins the actor to the driver's node, and takes none from the workers.
        self._resources = tune.PlacementGroupFactory([{f"node:{node_ip}": 0.0001}])
        self._spec: Mapping[str, Any] = {}

    @property
    def total_samples(self) -> int:
        """Ray Tune's."""
        return self._count

    def add_configurations(self, experiments: Any) -> None:
        """Ray Tune's: keeps the spec of the only experiment."""
        (experiment,) = experiments
        self._spec = experiment.spec

    def next_trial(self) -> Trial | None:
        """Ray Tune's: the next trial; None if there is no room for one."""
        if self.room <= 0 or self.is_finished():
            return None
        trial_id = next(self._trial_ids, None)
        if trial_id is not None:
            self._known -= 1
        elif self._search is not None:
            # It does not block while others train: Ray Tune must process their reports.
            trial_id = self._search.next(wait=not self._busy)
            if trial_id is None and not self._search.over:
                return None
        if trial_id is None:
            self.set_finished()
            return None
        self._busy.add(trial_id)
        return Trial(
            self._spec["run"],
            config={"cell": trial_id},
            trial_id=trial_id,
            experiment_tag=trial_id,
            storage=self._spec["storage"],
            checkpoint_config=self._spec["checkpoint_config"],
            placement_group_factory=self._resources,
            trial_dirname_creator=_dirname,
            max_failures=_ACTOR_FAILURES,
        )

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        """Ray Tune's: the trial's place is free again."""
        self._busy.discard(trial_id)
        if self._search is not None:
            self._search.released(trial_id)

    @property
    def left(self) -> int:
        """Trials still to come; with a search, the maximum."""
        return self._known + (self._search.left if self._search is not None else 0)

    @property
    def room(self) -> int:
        """How many more trials may start."""
        return self._at_once - len(self._busy)

    def paused(self, trial_id: str) -> None:
        """The trial is paused: its place is free."""
        self._busy.discard(trial_id)

    def resumes(self, trial_id: str) -> bool:
        """Whether there is room for a paused trial; if so, reserves the place."""
        if trial_id not in self._busy and self.room <= 0:
            return False
        self._busy.add(trial_id)
        return True


def _dirname(trial: Trial) -> str:
    return str(trial.trial_id)


class Decisions(_Unsaved, TrialScheduler):
    """Ray Tune's scheduler: passes reports to the rule, and the rule's decisions to the trial runner.

    `better`: min or max of the objective. Without a rule every trial trains to its end.
    """

    def __init__(
        self,
        rule: Rule | None,
        better: Literal["min", "max"],
        trial_runner: TrialRunner,
        log: SweepLog,
        queue: TrialQueue,
    ) -> None:
        super().__init__()
        self._rule, self._better, self._trial_runner, self._log, self._queue = rule, better, trial_runner, log, queue
        self._paused, self._frozen = PausedTrials(), 0
        self._controller: Any = None

    @property
    def supports_buffered_results(self) -> bool:
        """Ray Tune's."""
        return False

    def replay(self, events: Iterable[Event]) -> None:
        """Passes the reports of earlier drivers to the rule, so that it decides as if there had been no restart."""
        if self._rule is not None:
            replay(self._rule, events, self._better)

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """Ray Tune's: nothing to do, a new trial starts by itself."""

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        """Ray Tune's: the trial's actor failed, not the trial. Ray Tune restarts it."""
        self._paused.leave(trial)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        """Ray Tune's: whether the trial continues, stops or is paused for others."""
        if self._rule is None or METRIC not in result:
            return str(TrialScheduler.CONTINUE)
        trial_id, tokens, value = trial.trial_id, result[TIME], result[METRIC]
        for copied in self._trial_runner.adopted():
            self._rule.copied(copied["cell"], copied["tokens"], copied["changes"])
        self._log.event("report", trial_id, tokens=tokens, step=result["step"], value=value)
        because = f"{self._rule.name} at {tokens:,} tokens"
        decision = self._rule.report(trial_id, tokens, score(value, self._better))
        # In its last report a trial is at its end: it is neither stopped nor paused.
        match GO if result.get("last") else decision:
            case Stop():
                self._trial_runner.end(trial_id, EndRequest("stopped", because, at_once=True))
                return str(TrialScheduler.STOP)
            case Copy(source, changes) if self._trial_runner.ready(source):
                self._trial_runner.exploit(trial_id, source, changes)
            case Turn() | Copy() if self._queue.left + len(self._paused) > self._queue.room:
                self._trial_runner.end(trial_id, EndRequest("yielded", because, at_once=False))
            case _:
                return str(TrialScheduler.CONTINUE)
        self._queue.paused(trial_id)
        self._paused.wait(trial, tokens)
        self._freeze()
        return str(TrialScheduler.PAUSE)

    def _freeze(self) -> None:
        """Excludes paused trials from garbage collection: there may be thousands of them, for a long time."""
        if len(self._paused) >= self._frozen + _FREEZE_EVERY:
            self._frozen = len(self._paused)
            gc.collect()
            gc.freeze()

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        """Ray Tune's: the trial has ended."""
        self._controller = tune_controller
        if self._rule is not None:
            self._rule.over(trial.trial_id)

    def on_trial_remove(self, tune_controller: Any, trial: Trial) -> None:
        """Ray Tune's: a paused trial has ended."""
        self._paused.leave(trial)
        self.on_trial_complete(tune_controller, trial, {})

    def forget(self, trials: list[Trial]) -> None:
        """Removes ended trials from Ray Tune's list `trials`, and from its memory.

        Ray Tune iterates over that list at every step, and would keep 10,000 trials until the end of the sweep.
        """
        if any(trial.is_finished() for trial in trials):
            trials[:] = [trial for trial in trials if not trial.is_finished()]
        if self._controller is not None:
            for kept in (self._controller._stopped_trials, self._controller._failed_trials):
                self._controller._trials_to_cache -= kept
                kept.clear()

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """Ray Tune's: if there is room, the paused trial with the fewest tokens."""
        trial = self._paused.first()
        return trial if trial is not None and self._queue.resumes(trial.trial_id) else None

    def started(self, trial: Trial) -> None:
        """Ray Tune has started the trial: trains it."""
        self._paused.leave(trial)
        self._trial_runner.begin(trial.trial_id)

    def debug_string(self) -> str:
        """Ray Tune's."""
        return "none" if self._rule is None else self._rule.name


class _Closed(Exception):
    """The sweep is closed and no trial is running: ends Ray Tune's loop."""


class _Follow(_Unsaved, tune.Callback):
    """Starts training when Ray Tune starts a trial, and removes ended trials from Ray Tune."""

    def __init__(self, trial_runner: TrialRunner, decisions: Decisions) -> None:
        self._trial_runner, self._decisions = trial_runner, decisions

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self._decisions.started(trial)

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        if self._trial_runner.closed and not self._trial_runner.live():
            raise _Closed  # else Ray Tune would wait for the paused trials

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        self._decisions.forget(trials)


def fit(queue: TrialQueue, decisions: Decisions, trial_runner: TrialRunner, scratch: Path) -> None:
    """Runs all trials; returns when Ray Tune has no more of them. `scratch`: a folder for Ray Tune's files, which are not used.

    Call it in a thread whose name begins with "ray_": what Ray Tune prints then goes to the log.
    """
    with _quiet(), suppress(_Closed):
        tune.Tuner(
            CellTrial,
            # No metric and mode here: the scheduler has them already, for the reports of earlier drivers.
            tune_config=tune.TuneConfig(search_alg=queue, scheduler=decisions, reuse_actors=True),
            run_config=tune.RunConfig(
                name="cells", storage_path=str(scratch), verbose=0, callbacks=[_Follow(trial_runner, decisions)]
            ),
        ).fit()


@contextmanager
def _quiet() -> Iterator[None]:
    # Ray Tune would print about its own files, which are not used. Decisions are in the sweep's log, and errors are raised.
    logger = logging.getLogger("ray.tune")
    logger.handlers, logger.propagate = [logging.NullHandler()], False
    before = {name: os.environ.get(name) for name in _QUIET}
    os.environ.update(_QUIET)
    counts, air_usage.tag_callbacks = air_usage.tag_callbacks, lambda callbacks: False
    # With variables of their own Ray Tune's actors cannot be forked (ray_private.py); these actors need none.
    variables = class_cache.DEFAULT_ENV_VARS, class_cache.ENV_VARS_TO_PROPAGATE
    class_cache.DEFAULT_ENV_VARS, class_cache.ENV_VARS_TO_PROPAGATE = {}, set()
    try:
        yield
    finally:
        air_usage.tag_callbacks = counts
        class_cache.DEFAULT_ENV_VARS, class_cache.ENV_VARS_TO_PROPAGATE = variables
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
