"""A simulated sweep of 10,000 cells: how long each decision takes, and what is kept of cells that are over.

    python benchmarks/sweep_scale.py [--cells 10000] [--at-once 16]

The queue, asha and the log are those of `raydist sweep`, the trials Ray Tune's own; workers and Ray are left out. Each cell reports
four times. A decision is all that happens between a report and what is done about it: the rung, the log, the next cell.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
import tracemalloc
from types import SimpleNamespace
from typing import Any, cast

from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from raydist.cluster.sweep import tuning
from raydist.cluster.sweep.floor import Floor
from raydist.spec.sweep import SweepSpec
from raydist.sweepdir import SweepDir, SweepLog

REPORTS, TOKENS = 4, 4096


class _Trial(Trial):
    def __init__(self, name: str, **told: Any) -> None:
        super().__init__(name, stub=True, config=told["config"], trial_id=told["trial_id"])


class _Floor:
    def end(self, cell: str, wish: object) -> None:
        """Nobody trains."""


class _Controller:
    """What Ray Tune keeps of trials."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []
        self._stopped_trials: set[Trial] = set()
        self._failed_trials: set[Trial] = set()
        self._trials_to_cache: set[Trial] = set()


def main() -> None:
    """Prints one JSON object: milliseconds a decision, and MiB after a tenth and after all of the cells."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=16)
    asked = parser.parse_args()
    chance, times, sizes = random.Random(1), [], {}
    setattr(tuning, "Trial", _Trial)  # noqa: B010  # without Ray's registry of trainables
    spec = SweepSpec.model_validate(
        {"base": "b", "array": {"parameters": [{"lr": [1]}]}, "scheduler": {"name": "asha"}}
    )
    with tempfile.TemporaryDirectory() as folder:
        log = SweepLog(SweepDir(folder))
        cells = [f"cell-{number:06d}" for number in range(asked.cells)]
        queue = tuning.CellQueue(cells, asked.at_once, "10.0.0.1")
        queue.add_configurations([SimpleNamespace(spec={"run": "x", "storage": None, "checkpoint_config": None})])
        floor, controller = cast(Floor, _Floor()), _Controller()
        scheduler = tuning.scheduler(spec, [], TOKENS, floor)
        scheduler.set_search_properties(tuning.METRIC, "min")
        decisions = tuning.Decisions(scheduler, floor, log, queue)
        done, stopped, busy = 0, 0, {}
        tracemalloc.start()
        while done < asked.cells:
            begun = time.perf_counter()
            while (trial := queue.next_trial()) is not None:
                controller.trials.append(trial)
                controller._trials_to_cache.add(trial)
                decisions.on_trial_add(controller, trial)
                busy[trial] = 0
            trial = chance.choice(list(busy))
            busy[trial] += 1
            told = {tuning.TIME: busy[trial] * TOKENS // REPORTS, tuning.METRIC: chance.random(), "step": busy[trial]}
            last = busy[trial] == REPORTS
            decision = TrialScheduler.STOP if last else decisions.on_trial_result(controller, trial, told)
            if decision == TrialScheduler.STOP:
                done, stopped = done + 1, stopped + (not last)
                del busy[trial]
                decisions.on_trial_complete(controller, trial, told)
                queue.on_trial_complete(trial.trial_id)
                trial.set_status(Trial.TERMINATED)
                controller._stopped_trials.add(trial)
                decisions.forget(controller.trials)
                if done in (asked.cells // 10, asked.cells):
                    sizes[done] = tracemalloc.get_traced_memory()[0] / 2**20
            times.append(time.perf_counter() - begun)
            if len(times) % 100 == 0:
                log.flush()
        kept = len(controller.trials) + len(controller._stopped_trials) + len(controller._trials_to_cache)
    times.sort()
    told = {
        "cells": asked.cells,
        "stopped_early": stopped,
        "decisions": len(times),
        "decide_ms": {
            name: round(times[int(share * (len(times) - 1))] * 1000, 3)
            for name, share in (("median", 0.5), ("p99", 0.99), ("max", 1.0))
        },
        "python_mib_after_cells": {str(count): round(size, 2) for count, size in sizes.items()},
        "trials_kept": kept,
        "rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
