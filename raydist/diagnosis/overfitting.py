"""The held-out loss rises while the training loss falls: the model memorizes the training data.

Runs anywhere: plain python and numpy.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydist.diagnosis._symptoms import figure
from raydist.diagnosis._window import SMOOTH, Array, Window
from raydist.records import Finding

CAUSE = "the model overfits"
LOOKS = "the newest evaluations against the best one, and the training loss between them"
THRESHOLDS = {
    "evaluations": ("3 in a row above the best, each above the one before", "by chance one time in 24"),
    "rise": ("1% above the best", "less is noise of most held-out sets"),
    "noise": (
        "and 6 standard deviations of the run's evaluations, each against the mean of its neighbours",
        "the best of hundreds is 3 below the mean by chance, and the worst 3 above",
    ),
}
ROW, RISE, SIGMAS = 3, 0.01, 6.0


def check(window: Window) -> Iterator[Finding]:
    """While the newest evaluations rise."""
    evals = evaluations(window)
    steps, losses = list(evals), list(evals.values())
    if len(losses) <= ROW:
        return
    last = losses[-ROW - 1 :]
    best = int(np.argmin(losses))
    enough = max(RISE * abs(losses[best]), SIGMAS * _noise(np.array(losses)))
    if best > len(losses) - 1 - ROW or last[-1] < losses[best] + enough or not (np.diff(last) > 0).all():
        return
    numbers, trained = window.steps["step"], window.steps["loss"]
    around = trained[(numbers > steps[best] - 20) & (numbers <= steps[best])]
    if not len(around) or not len(trained) or np.nanmedian(trained[-20:]) >= np.nanmedian(around):
        return
    yield Finding(
        rule="overfitting",
        rank=None,
        severity="warning",
        what=f"the held-out loss has risen from {losses[best]:.4g} at step {steps[best]} to {last[-1]:.4g}, "
        "while the training loss fell",
        figures={"best_step": steps[best], "best": losses[best], "now": last[-1]},
        remedy=f"stop here: the best checkpoint is that of step {steps[best]}; else use more data, fewer epochs, "
        "optim.weight_decay or dropout",
        cause="the training data is repeated",
        culprit={"setting": "train.steps"},
        evidence=[
            figure("held-out loss now over the best", last[-1] / losses[best], "events: eval"),
            figure("training loss then", float(np.nanmedian(around)), "steps: loss"),
            figure("training loss now", float(np.nanmedian(trained[-20:])), "steps: loss"),
        ],
        others=[{"cause": "the learning rate is too high", "against": "the training loss falls"}],
        confidence=0.8,
    )


def _noise(losses: Array) -> float:
    """The spread of a single evaluation, robust, and without the trend."""
    apart = losses[1:-1] - (losses[:-2] + losses[2:]) / 2
    return float(SMOOTH * np.median(np.abs(apart)) / np.sqrt(1.5))


def evaluations(window: Window) -> dict[int, float]:
    """Step -> held-out loss of the newest evaluation of it, by step."""
    evals = window.of("eval")
    return dict(
        sorted({e.data["step"]: float(e.data["loss"]) for e in evals if e.data.get("loss") is not None}.items())
    )
