"""The loss rises and does not go back, or the gradient grows until numbers are not finite: the learning rate is too high.

Runs anywhere: plain python and numpy.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydist.diagnosis._losses import BACK, BEFORE, OF_FIRST, RELATIVE, SIGMAS, TIMES, growth, jump, least_rise
from raydist.diagnosis._symptoms import Candidate, figure
from raydist.diagnosis._window import SMOOTH, Window
from raydist.records import Finding

ONCE = True
SYMPTOM = "loss"
CAUSE = "the learning rate is too high"
LOOKS = "whether the loss stays above its lowest median for 20 steps, and whether the gradient grows"
THRESHOLDS = {
    "rise": (
        f"{SIGMAS:g} times the noise of a median of 20, {RELATIVE:.0%}, and {OF_FIRST:.0%} of the first loss or {TIMES:g} times",
        "benchmarks/doctor.py: 0 of its healthy runs",
    ),
    "growth": (
        "2 times the gradient of 50 steps before",
        "a gradient that only falls or is noisy stays below; benchmarks/doctor.py",
    ),
}
STEPS, GROWTH, KEPT = 20, 2.0, 400


def check(window: Window) -> Iterator[Finding | Candidate]:
    """One finding for the job."""
    grown = growth(window)
    lr = window.setting("optim.lr")
    lower = f"{lr / 3:.2g}" if isinstance(lr, (int, float)) else "a third"
    warm = "" if window.setting("optim.schedule.warmup") else " and set a warm-up (optim.schedule)"
    remedy = f"lower optim.lr to {lower}{warm}; continue from the checkpoint before the rise: raydist train --init-from"
    losses = window.steps["loss"][-KEPT:]
    finite = losses[np.isfinite(losses)]
    if len(finite) >= 3 * STEPS:
        views = np.lib.stride_tricks.sliding_window_view(finite, STEPS)
        middles = np.median(views, axis=1)
        noise = SMOOTH * float(np.median(np.abs(np.diff(finite)))) / np.sqrt(2)
        low = int(middles[:-STEPS].argmin())
        rise = float(middles[-1] - middles[low])
        spike = jump(window)
        goes_back = spike is not None and spike.left <= BACK
        enough = max(SIGMAS * noise * 1.25 / np.sqrt(STEPS), float(least_rise(middles[low], window.steps.first_loss)))
        if rise > enough and float(finite[-STEPS:].min()) > middles[low] and not goes_back:
            step = window.steps.row(-1)["step"]
            yield Finding(
                rule="lr_too_high",
                rank=None,
                severity="critical",
                what=f"the loss has risen from {middles[low]:.4g} to {middles[-1]:.4g} and stays there for "
                f"{STEPS} steps (step {step})",
                figures={
                    "kind": "rise",
                    "lowest": float(middles[low]),
                    "now": float(middles[-1]),
                    "gradient_growth": grown,
                },
                remedy=remedy,
                symptom=SYMPTOM,
                cause="the learning rate is too high",
                culprit={"setting": "optim.lr"},
                evidence=[
                    figure("rise of the median of 20 losses", rise, "steps: loss"),
                    figure("noise of the loss from step to step", noise, "steps: loss"),
                    figure("gradient's growth over the last 50 steps", grown, "steps: grad_norm"),
                    figure("learning rate", float(window.steps["lr"][-1]), "steps: lr"),
                ],
                others=[
                    {"cause": "the data of one batch", "against": f"the loss has not gone back for {STEPS} steps"},
                ],
                confidence=0.85 if grown >= GROWTH else 0.7,
            )
    for event in window.fresh:
        if event.kind == "non_finite":
            yield Candidate(
                Finding(
                    rule="lr_too_high",
                    rank=None,
                    severity="critical",
                    what=f"{event.data['cause']}: the gradient had grown {grown:.1f} times over the 50 steps before",
                    figures={
                        "kind": f"not finite {event.data['step']}",
                        "step": event.data["step"],
                        "gradient_growth": grown,
                    },
                    remedy=remedy,
                    symptom=SYMPTOM,
                    cause="the learning rate is too high",
                    culprit={"setting": "optim.lr"},
                    evidence=[figure("gradient's growth over the last 50 steps", grown, "steps: grad_norm")],
                ),
                0.9 if grown >= GROWTH else 0.1,
                f"the gradient before was {grown:.1f} times that of {BEFORE} steps earlier",
            )
