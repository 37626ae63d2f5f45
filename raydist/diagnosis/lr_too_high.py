"""The loss rises and does not go back, or the gradient grows until numbers are not finite: the learning rate is too high.

Runs anywhere: plain python and numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from raydist.diagnosis._losses import AGAIN, BACK, BEFORE, OF_FIRST, RELATIVE, SIGMAS, growth, jump, least_rise
from raydist.diagnosis._symptoms import Candidate, figure
from raydist.diagnosis._window import SMOOTH, Array, Window
from raydist.records import Finding

ONCE = True
SYMPTOM = "loss"
CAUSE = "the learning rate is too high"
LOOKS = "whether the loss stays above its lowest median for 20 steps, or comes back slowly after a jump; whether the gradient grows"
THRESHOLDS = {
    "rise": (
        f"{SIGMAS:g} times the noise of a median of 20, {RELATIVE:.0%}, and {OF_FIRST:.0%} of the first loss",
        "benchmarks/doctor.py: 0 of its healthy runs",
    ),
    "swings": (
        "1.5 times the largest rise of such a median in the last 400 steps that has gone back",
        "benchmarks/doctor.py: data in blocks of 20 steps, some of it harder",
    ),
    "jump": (
        f"one of bad_batch, with more than {AGAIN} steps after it that are not back",
        "benchmarks/doctor_ranks.py",
    ),
    "growth": (
        "2 times the gradient of 50 steps before",
        "a gradient that only falls or is noisy stays below; benchmarks/doctor.py",
    ),
}
STEPS, GROWTH, KEPT, SWINGS = 20, 2.0, 400, 1.5


def check(window: Window) -> Iterator[Finding | Candidate]:
    """One finding for the job."""
    grown = growth(window)
    spike = jump(window)
    losses = window.steps["loss"][-KEPT:]
    finite = losses[np.isfinite(losses)]
    if len(finite) >= 3 * STEPS:
        views = np.lib.stride_tricks.sliding_window_view(finite, STEPS)
        middles = np.median(views, axis=1)
        noise = SMOOTH * float(np.median(np.abs(np.diff(finite)))) / np.sqrt(2)
        low = int(middles[:-STEPS].argmin())
        rise = float(middles[-1] - middles[low])
        goes_back = spike is not None and spike.left <= BACK
        enough = max(SIGMAS * noise * 1.25 / np.sqrt(STEPS), float(least_rise(middles[low], window.steps.first_loss)))
        enough = max(enough, SWINGS * _swing(middles))
        if rise > enough and float(finite[-STEPS:].min()) > middles[low] and not goes_back:
            step = window.steps.row(-1)["step"]
            yield _finding(
                window,
                f"the loss has risen from {middles[low]:.4g} to {middles[-1]:.4g} and stays there for {STEPS} steps (step {step})",
                {"kind": "rise", "lowest": float(middles[low]), "now": float(middles[-1])},
                [
                    figure("rise of the median of 20 losses", rise, "steps: loss"),
                    figure("noise of the loss from step to step", noise, "steps: loss"),
                ],
                confidence=0.85 if grown >= GROWTH else 0.7,
                against_one_batch=f"the loss has not gone back for {STEPS} steps",
            )
    if spike is not None and spike.many_batches:
        row = window.steps.row(spike.at)
        yield _finding(
            window,
            f"step {row['step']}: the loss jumped from {spike.before:.4g} to {row['loss']:.4g}, and was far above in {spike.again} "
            f"of the {spike.steps} steps after it, too",
            {"kind": "rise", "step": row["step"], "loss": row["loss"], "before": spike.before},
            [
                figure("jump over the noise of the loss", spike.size / max(spike.noise, 1e-9), "steps: loss"),
                figure("steps after it that are far above, too", float(spike.again), "steps: loss"),
            ],
            confidence=0.7,
            against_one_batch=f"{spike.again} batches after it have high losses, too",
        )
    for event in window.fresh:
        if event.kind == "non_finite":
            yield Candidate(
                _finding(
                    window,
                    f"{event.data['cause']}: the gradient had grown {grown:.1f} times over the 50 steps before",
                    {"kind": f"not finite {event.data['step']}", "step": event.data["step"]},
                    [],
                ),
                0.9 if grown >= GROWTH else 0.1,
                f"the gradient before was {grown:.1f} times that of {BEFORE} steps earlier",
            )


def _swing(middles: Array) -> float:
    """The largest rise before the newest ones that has gone back: above the lowest median before it and the lowest after it."""
    before, after = np.minimum.accumulate(middles), np.minimum.accumulate(middles[::-1])[::-1]
    return float((middles - np.maximum(before, after))[: -2 * STEPS].max(initial=0.0))


def _finding(
    window: Window,
    what: str,
    figures: dict[str, Any],
    evidence: list[dict[str, Any]],
    confidence: float | None = None,
    against_one_batch: str = "",
) -> Finding:
    grown, rates = growth(window), window.steps["lr"]
    lr = window.setting("optim.lr") if not window.of_script else float(np.nanmax(rates)) if len(rates) else None
    lower = f"{lr / 3:.2g}" if isinstance(lr, (int, float)) else "a third"
    warm = "" if window.setting("optim.schedule.warmup") else " and set a warm-up (optim.schedule)"
    back = "raydist.open(RUN).weights(STEP)" if window.of_script else "raydist train --init-from"
    now = [figure("learning rate", float(rates[-1]), "steps: lr")] if len(rates) else []
    return Finding(
        rule="lr_too_high",
        rank=None,
        severity="critical",
        what=what,
        figures={**figures, "gradient_growth": grown},
        remedy=f"lower {window.named('optim.lr')} to {lower}{warm}; continue from the checkpoint before the rise: {back}",
        symptom=SYMPTOM,
        cause="the learning rate is too high",
        culprit={"setting": window.named("optim.lr")},
        evidence=[*evidence, figure("gradient's growth over the last 50 steps", grown, "steps: grad_norm"), *now],
        others=[{"cause": "the data of one batch", "against": against_one_batch}] if against_one_batch else [],
        confidence=confidence,
    )
