"""The data is repeated so often that nothing new is learnt of it: the held-out loss stands still while the training loss falls.

Runs anywhere: plain python and numpy. Where it rises, see overfitting.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydist.diagnosis import overfitting
from raydist.diagnosis._before import EPOCHS
from raydist.diagnosis._symptoms import figure
from raydist.diagnosis._window import Window
from raydist.records import Finding

CAUSE = "tokens are repeated more often than it helps"
LOOKS = "passes over the data, evaluations of the newest pass against the best one before, and the training loss in that pass"
THRESHOLDS = {
    "passes": (
        f"{EPOCHS:g}",
        "that many over the same tokens are nearly as good as new ones (Muennighoff et al. 2023, arXiv 2305.16264)",
    ),
    "held-out": ("0.1% below the best of the passes before, in none of 3 evaluations or more", "less is noise"),
    "training": (
        "fallen by 1% within that pass, medians of 20 steps",
        "else training has converged, and data is not why",
    ),
}
LEAST, GAIN, FALL, STEPS = 3, 0.001, 0.01, 20


def check(window: Window) -> Iterator[Finding]:
    """While it lasts."""
    of_pass = next((n for e in reversed(window.of("first_step")) if (n := e.data.get("steps_per_epoch"))), 0)
    numbers, trained = window.steps["step"], window.steps["loss"]
    if not of_pass or not len(numbers) or (passes := float(numbers[-1]) / of_pass) <= EPOCHS:
        return
    begun = numbers[-1] - of_pass
    evals = overfitting.evaluations(window)
    before = [loss for step, loss in evals.items() if step <= begun]
    newest = [loss for step, loss in evals.items() if step > begun]
    losses = trained[numbers > numbers[-1] - max(of_pass, 3 * STEPS)]
    if len(newest) < LEAST or not before or len(losses) < 3 * STEPS or any(overfitting.check(window)):
        return
    first, last = float(np.nanmedian(losses[:STEPS])), float(np.nanmedian(losses[-STEPS:]))
    if min(newest) < min(before) * (1 - GAIN) or not last < first * (1 - FALL):
        return
    best = min(evals, key=lambda step: evals[step])
    yield Finding(
        rule="repeated_tokens",
        rank=None,
        severity="warning",
        what=f"each token has been trained {passes:.1f} times: in the newest pass the held-out loss has not fallen below "
        f"{min(before):.4g}, while the training loss fell from {first:.4g} to {last:.4g}",
        figures={"passes": passes, "best": min(before), "newest": min(newest)},
        remedy=f"use more data; or stop here: the best checkpoint is that of step {best}; optim.weight_decay or dropout make "
        "repeated tokens last longer",
        cause="the data is small for the length of the run",
        culprit={"setting": "train.steps"},
        evidence=[
            figure("passes over the data", passes, "steps, event: first_step"),
            figure("best held-out loss of the newest pass over that before", min(newest) / min(before), "events: eval"),
            figure("training loss now over that at the beginning of the pass", last / first, "steps: loss"),
        ],
        others=[{"cause": "training has converged", "against": "the training loss still falls"}],
        confidence=0.8,
    )
