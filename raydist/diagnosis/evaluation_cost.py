"""Evaluation costs too much: the held-out set is large, or it is computed often.

Runs anywhere: plain python and numpy. A step's seconds end before its evaluation: what steps, hooks and copies of checkpoints do
not take of the time between two evaluations is the evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydist.diagnosis._symptoms import figure
from raydist.diagnosis._window import Window
from raydist.records import Finding

CAUSE = "evaluation costs too much"
LOOKS = "the time between the newest evaluations, less that of steps, hooks and the stalls of checkpoints"
COLUMNS = ("hooks_seconds",)
THRESHOLDS = {
    "cost": ("0.2 of the time", "four times what this project's jobs are set to; a fifth of the run is worth a change"),
    "evaluations": ("4", "the first one of an attempt fills caches"),
}
COST, LEAST, TARGET = 0.2, 4, 0.05


def check(window: Window) -> Iterator[Finding]:
    """One finding for the job."""
    begun = max((e.at for e in window.of("attempt_started", "first_step")), default=0.0)
    evals = [e for e in window.of("eval") if e.at > begun][-LEAST:]
    if len(evals) < LEAST:
        return
    first, last = evals[0], evals[-1]
    numbers = window.steps["step"]
    between = (numbers > first.data["step"]) & (numbers <= last.data["step"])
    steps, passed = last.data["step"] - first.data["step"], last.at - first.at
    if passed <= 0 or steps < 1 or between.sum() != steps:
        return
    trained = float(window.steps["seconds"][between].sum())
    stalls = sum(e.data["stall_seconds"] for e in window.of("checkpoint_saved") if first.at < e.at <= last.at)
    hooks = float(np.nan_to_num(window.recent("rank", "hooks_seconds")).max(initial=0.0))
    cost = (passed - trained - stalls) / passed - hooks
    if cost < COST:
        return
    count = LEAST - 1
    each, every = cost * passed / count, steps / count
    want = int(each * (1 - TARGET) / TARGET / (trained / steps)) + 1
    yield Finding(
        rule="evaluation_cost",
        rank=None,
        severity="warning",
        what=f"evaluation takes {cost:.0%} of the time: {each:.3g} s after every {every:.0f} steps",
        figures={"cost": cost, "seconds": each, "every": want},
        remedy=f"set eval.every: {max(want, round(every) + 1)}, which lowers the cost to about {TARGET:.0%}; or lower eval.batches",
        cause="the held-out batches take long for how often they are computed",
        culprit={"setting": "eval.every"},
        evidence=[
            figure("seconds between two evaluations", passed / count, "events: eval"),
            figure("seconds of the steps between them", trained / count, "steps: seconds"),
        ],
        others=[
            {
                "cause": "checkpoints cost too much",
                "against": f"training waited {stalls / passed:.1%} of the time for them",
            }
        ],
        confidence=0.9,
        lost=cost,
    )
