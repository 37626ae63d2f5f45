"""A simulated sweep of 10,000 trials (`--cells`): the time of each decision, and the memory.

    python benchmarks/sweep_scale.py [--cells 10000] [--at-once 16]

It uses the queue, the paused trials, the rules and the log of `raydist sweep`, and Ray Tune's trials, without workers and Ray.
Each trial reports four times. A decision is everything between a report and its effect: the rule, the log, the next trial. With
pbt all trials are one population and run alternately: thousands of trials are paused, and each of them is ranked.

Each decision is measured in wall-clock time and in processor time of this thread. On a shared machine the processor time is the
cost of a decision; wall-clock time also includes other processes. Both include Python's garbage collector, and its longest pause
is reported. It mostly scans imported modules, so `frozen` has the same sweep after `gc.freeze()`, which the driver of a sweep
calls before its first decision. (Paused trials are frozen in both.)

`beside_ray_tune`: one decision with all trials known, by our rule and by Ray Tune's scheduler alternately: the rule only, without
log and queue; and the memory of our rule.

Memory is Python's own, from a second pass of the same sweep, because tracing takes time. Writes results/sweep_scale.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import resource
import tempfile
import time
import tracemalloc
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

from common import write
from ray.tune.experiment import Trial
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.schedulers.pbt import _PBTTrialState

from raydist.cluster.sweep import ray_tune, schedulers
from raydist.cluster.sweep.trial_runner import TrialRunner
from raydist.run.sweep_directory import SweepDir, SweepLog
from raydist.spec.sweep import Axis, SweepSpec

REPORTS, TOKENS = 4, 4096
RULES: dict[str, dict[str, Any]] = {
    "asha": {"name": "asha"},
    "hyperband": {"name": "hyperband"},
    "median": {"name": "median", "every": TOKENS // REPORTS},
    "pbt": {"name": "pbt", "every": TOKENS // REPORTS},
}
RATE = Axis("lr", "optim.lr", "log_uniform", low=1e-4, high=1e-2)
MEMORY_AT = (0.2, 1.0)
"""Shares of the trials after which memory is measured."""


class _Trial(Trial):
    def __init__(self, name: str, **told: Any) -> None:
        super().__init__(name, stub=True, config=told["config"], trial_id=told["trial_id"])


class _FakeTrialRunner:
    """Trains nothing; copies take effect at once."""

    def __init__(self) -> None:
        self.copies: list[Mapping[str, Any]] = []
        self.count = 0

    def begin(self, cell: str) -> None:
        """Nothing."""

    def end(self, cell: str, end_request: object) -> None:
        """Nothing."""

    def ready(self, cell: str) -> bool:
        """Every trial has checkpoints."""
        return True

    def exploit(self, cell: str, source: str, changes: Mapping[str, Any]) -> None:
        """The rule gets the copy with the next report."""
        self.copies.append({"cell": cell, "tokens": 0, "changes": changes})
        self.count += 1

    def adopted(self) -> Iterator[Mapping[str, Any]]:
        """Each copy once."""
        while self.copies:
            yield self.copies.pop()


class _Controller:
    """Ray Tune's lists of trials."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []
        self._stopped_trials: set[Trial] = set()
        self._failed_trials: set[Trial] = set()
        self._trials_to_cache: set[Trial] = set()


class Sweep:
    """One sweep. `run()` runs it to its end; `wall` and `cpu`: nanoseconds of every decision."""

    def __init__(self, name: str, cells: int, at_once: int, folder: str, memory: bool) -> None:
        told = {"base": "b", "array": {"parameters": [{"lr": [1]}]}, "scheduler": RULES[name]}
        spec = SweepSpec.model_validate(told)
        ids = [f"cell-{number:06d}" for number in range(cells)]
        self.own = {cell: {"optim.lr": 1e-3} for cell in ids}
        self.cells, self.chance, self.memory = cells, random.Random(1), memory
        self.log, self.runner, self.controller = SweepLog(SweepDir(folder)), _FakeTrialRunner(), _Controller()
        self.queue = ray_tune.TrialQueue(ids, at_once, "10.0.0.1")
        self.queue.add_configurations([SimpleNamespace(spec={"run": "x", "storage": None, "checkpoint_config": None})])
        rule = schedulers.make(spec, [RATE], TOKENS, self.own.__getitem__)
        self.decisions = ray_tune.Decisions(rule, "min", cast(TrialRunner, self.runner), self.log, self.queue)
        self.busy: list[Trial] = []
        self.reports: dict[Trial, int] = {}
        self.done = self.stopped = self.paused = 0
        self.pauses = Pauses()
        self.wall: list[int] = []
        self.cpu: list[int] = []
        self.but_for_gc: list[int] = []
        self.mib: dict[int, float] = {}

    def run(self) -> None:
        """Runs until every trial has ended."""
        while self.done < self.cells:
            paused, wall, cpu = self.pauses.total, time.perf_counter_ns(), time.thread_time_ns()
            self.decide()
            if not self.memory:
                self.cpu.append(time.thread_time_ns() - cpu)
                self.wall.append(time.perf_counter_ns() - wall)
                self.but_for_gc.append(self.cpu[-1] - (self.pauses.total - paused))
            elif self.done in {int(self.cells * share) for share in MEMORY_AT} - set(self.mib):
                self.mib[self.done] = tracemalloc.get_traced_memory()[0] / 2**20
            if (self.done + self.paused) % 100 == 0:
                self.log.flush()  # in a real sweep another thread does this

    def decide(self) -> None:
        """Ray Tune's calls in one step, with one report."""
        while (trial := self.queue.next_trial()) is not None:
            self.controller.trials.append(trial)
            self.controller._trials_to_cache.add(trial)
            self.decisions.on_trial_add(self.controller, trial)
            self.start(trial)
        while (trial := self.decisions.choose_trial_to_run(self.controller)) is not None:
            self.start(trial)
        place = self.chance.randrange(len(self.busy))
        trial = self.busy[place]
        count = self.reports[trial] = self.reports.get(trial, 0) + 1
        told = {ray_tune.TIME: count * TOKENS // REPORTS, ray_tune.METRIC: self.chance.random(), "step": count}
        last = count == REPORTS
        decision = TrialScheduler.STOP if last else self.decisions.on_trial_result(self.controller, trial, told)
        if decision != TrialScheduler.CONTINUE:
            self.busy[place] = self.busy[-1]
            self.busy.pop()
        if decision == TrialScheduler.PAUSE:
            self.paused += 1
            trial.set_status(Trial.PAUSED)
        elif decision == TrialScheduler.STOP:
            self.done, self.stopped = self.done + 1, self.stopped + (not last)
            del self.reports[trial]
            self.decisions.on_trial_complete(self.controller, trial, told)
            self.queue.on_trial_complete(trial.trial_id)
            trial.set_status(Trial.TERMINATED)
            self.controller._stopped_trials.add(trial)
            if not self.paused:  # with thousands of them, Ray Tune calls this in each of its own steps
                self.decisions.forget(self.controller.trials)

    def start(self, trial: Trial) -> None:
        """Ray Tune starts it."""
        self.decisions.started(trial)
        trial.set_status(Trial.RUNNING)
        self.busy.append(trial)


class Pauses:
    """Nanoseconds of processor time of each garbage collection."""

    def __init__(self) -> None:
        self.each: list[int] = []
        self.total = self._begun = 0

    def __call__(self, phase: str, info: Mapping[str, int]) -> None:
        """Callback of Python's gc."""
        if phase == "start":
            self._begun = time.thread_time_ns()
        else:
            self.each.append(time.thread_time_ns() - self._begun)
            self.total += self.each[-1]


def spread(nanoseconds: list[int]) -> dict[str, float]:
    """Median, 99th percentile and maximum in milliseconds."""
    found = sorted(nanoseconds)
    shares = (("median", 0.5), ("p99", 0.99), ("max", 1.0))
    return {name: round(found[int(share * (len(found) - 1))] / 1e6, 3) for name, share in shares}


def timed(name: str, cells: int, at_once: int) -> dict[str, Any]:
    """Time of the decisions of one sweep."""
    with tempfile.TemporaryDirectory() as folder:
        sweep = Sweep(name, cells, at_once, folder, memory=False)
        gc.collect()
        gc.callbacks.append(sweep.pauses)
        sweep.run()
        gc.callbacks.remove(sweep.pauses)
    each = sweep.pauses.each
    return {
        "decisions": len(sweep.wall),
        "stopped_early": sweep.stopped,
        "copies": sweep.runner.count,
        "turns": sweep.paused - sweep.runner.count,
        "cpu_ms": spread(sweep.cpu),
        "cpu_ms_but_for_gc": spread(sweep.but_for_gc),
        "wall_ms": spread(sweep.wall),
        "gc": {
            "collections": len(each),
            "of_over_5_ms": sum(pause > 5e6 for pause in each),
            "longest_cpu_ms": round(max(each, default=0) / 1e6, 3),
        },
    }


def traced(name: str, cells: int, at_once: int) -> dict[str, float]:
    """MiB of Python memory after a fifth and after all of the trials, above that at the start of the sweep."""
    with tempfile.TemporaryDirectory() as folder:
        tracemalloc.start()
        sweep = Sweep(name, cells, at_once, folder, memory=True)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0] / 2**20
        sweep.run()
        tracemalloc.stop()
    return {str(count): round(mib - before, 2) for count, mib in sweep.mib.items()}


class Theirs:
    """Ray Tune's scheduler that corresponds to a rule of ours, with the state of `cells` trials."""

    def __init__(self, name: str, cells: int) -> None:
        chance = random.Random(1)
        self.trials = [Trial("x", stub=True, trial_id=f"cell-{number:06d}") for number in range(cells)]
        match name:
            case "asha":
                self.scheduler = AsyncHyperBandScheduler("tokens", "score", "max", max_t=10**9)
                self.scheduler._brackets[0]._rungs = [
                    (TOKENS // REPORTS, {t.trial_id: chance.random() for t in self.trials})
                ]
            case "median":
                self.scheduler = MedianStoppingRule("tokens", "score", "max", grace_period=1)
                for trial in self.trials:
                    told = [{"tokens": n * TOKENS // REPORTS, "score": chance.random()} for n in range(1, REPORTS)]
                    self.scheduler._results[trial] = told
            case "pbt":
                mutations = {"lr": [1, 2]}
                self.scheduler = PopulationBasedTraining(
                    "tokens", "score", "max", TOKENS // REPORTS, hyperparam_mutations=mutations
                )
                for trial in self.trials:
                    trial.set_status(Trial.RUNNING)
                    state = self.scheduler._trial_state[trial] = _PBTTrialState(trial)
                    state.last_score, state.last_perturbation_time = chance.random(), TOKENS // REPORTS
        # Saves are no-ops, so no trial copies: copies would take even longer.
        self.controller = SimpleNamespace(
            get_trials=lambda: self.trials, _schedule_trial_save=lambda *_, **__: None, search_alg=None
        )

    def report(self, name: str, number: int, tokens: int, score: float) -> None:
        """A report of a new trial; for pbt, of a known one, because all train at the same time."""
        trial = self.trials[number] if name == "pbt" else Trial("x", stub=True, trial_id=f"new-{number}")
        if name == "asha":
            self.scheduler.on_trial_add(self.controller, trial)
        self.scheduler.on_trial_result(self.controller, trial, {"tokens": tokens, "score": score})


def known(name: str, cells: int) -> schedulers.Rule:
    """Our rule with the state of `cells` trials."""
    told = {"base": "b", "array": {"parameters": [{"lr": [1]}]}, "scheduler": {**RULES[name]}}
    if name == "asha":
        told["scheduler"] |= {"rungs": [TOKENS // REPORTS]}
    own = {"optim.lr": 1e-3}
    rule = schedulers.make(SweepSpec.model_validate(told), [RATE], TOKENS, lambda cell: own)
    assert rule is not None
    chance = random.Random(1)
    for number in range(cells):
        for report in range(1, REPORTS if name == "median" else 2):
            rule.report(f"cell-{number:06d}", report * TOKENS // REPORTS, chance.random())
    return rule


def beside(name: str, cells: int, count: int = 100) -> dict[str, Any]:
    """Compares `count` decisions of our rule and of Ray Tune's."""
    theirs = Theirs(name, cells)
    tracemalloc.start()
    ours = known(name, cells)
    mine = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    chance, cpu = random.Random(2), {"ours": list[int](), "ray_tunes": list[int]()}
    tokens = (REPORTS - 1 if name == "median" else 2 if name == "pbt" else 1) * TOKENS // REPORTS
    for number in range(count):
        score = chance.random()
        begun = time.thread_time_ns()
        ours.report(f"cell-{number:06d}" if name == "pbt" else f"new-{number}", tokens, score)
        between = time.thread_time_ns()
        theirs.report(name, number, tokens, score)
        cpu["ours"].append(between - begun)
        cpu["ray_tunes"].append(time.thread_time_ns() - between)
    return {"cpu_ms": {whose: spread(found) for whose, found in cpu.items()}, "our_mib": round(mine / 2**20, 2)}


def main() -> None:
    """Prints and writes results/sweep_scale.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=16)
    asked = parser.parse_args()
    logging.getLogger("ray.tune").setLevel(logging.WARNING)
    setattr(ray_tune, "Trial", _Trial)  # noqa: B010  # without Ray's registry of trainables
    result: dict[str, Any] = {
        "cells": asked.cells,
        "at_once": asked.at_once,
        "counts": "cpu_ms, processor time of the deciding thread: wall_ms also has what other processes took on a shared machine",
    }
    besides = {name: beside(name, asked.cells) for name in ("asha", "median", "pbt")}
    kinds = {name: {"not_frozen": timed(name, asked.cells, asked.at_once)} for name in RULES}
    gc.collect()
    gc.freeze()
    for name in RULES:
        kinds[name]["frozen"] = timed(name, asked.cells, asked.at_once)
        kinds[name]["python_mib_after_cells"] = traced(name, asked.cells, asked.at_once)
    result |= {
        "rules": kinds,
        "beside_ray_tune": besides,
        "rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }
    write("sweep_scale", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
