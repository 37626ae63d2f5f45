"""The loss jumps in one step and goes back, or one step is not finite after calm ones: the data of that batch.

Runs anywhere: plain python and numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from raydist.diagnosis._losses import AGAIN, BACK, BEFORE, NORM, OF_FIRST, RELATIVE, SIGMAS, growth, jump
from raydist.diagnosis._symptoms import Candidate, figure
from raydist.diagnosis._window import Window
from raydist.records import Finding

ONCE = True
SYMPTOM = "loss"
CAUSE = "the data of one batch"
LOOKS = "whether a jump of the loss is one step, and the loss goes back; whether the steps before were calm"
THRESHOLDS = {
    "jump": (
        f"{SIGMAS:g} times the run's own noise, {RELATIVE:.0%}, and {OF_FIRST:.0%} of the run's first loss",
        "robust z of the last 200 steps; benchmarks/doctor.py, benchmarks/doctor_ranks.py",
    ),
    "gradient": (f"{NORM:g} times the median norm of {BEFORE} steps", "a loss that is only noisy has a usual gradient"),
    "back": (
        f"{BACK:.0%} of the jump, and at most {AGAIN} of the {BEFORE} steps after it are not",
        "else the weights were damaged: see lr_too_high",
    ),
}
CALM = 2.0


def check(window: Window) -> Iterator[Finding | Candidate]:
    """The step, its batch, and where its samples come from."""
    found = jump(window)
    if found is not None and found.one_batch:
        row = window.steps.row(found.at)
        factor = max(1.2, (found.before + found.size / 2) / max(found.before, 1e-9))
        yield Finding(
            rule="bad_batch",
            rank=None,
            severity="warning",
            what=f"step {row['step']}: the loss jumped from {found.before:.4g} to {row['loss']:.4g} for one batch, and went back",
            figures={"kind": str(row["step"]), "step": row["step"], "loss": row["loss"], "before": found.before},
            remedy=_remedy(window, row["step"], f"skip, with recovery.spike.factor: {factor:.2g},"),
            symptom=SYMPTOM,
            cause="the samples of that batch",
            culprit={"step": row["step"], "samples_hash": row["samples_hash"]},
            evidence=[
                figure(
                    "jump over the noise of the loss", found.size / max(found.noise, 1e-9), "steps: loss, the last 200"
                ),
                figure("gradient over the median before", found.norm, "steps: grad_norm"),
                figure("share of the jump that is left after it", found.left, "steps: loss"),
            ],
            others=[
                {
                    "cause": "the learning rate is too high",
                    "against": f"the loss is back after {found.steps} steps, with the same learning rate",
                }
            ],
            confidence=0.9,
        )
    for event in window.fresh:
        if event.kind == "non_finite":
            grown = growth(window)
            yield Candidate(
                _not_finite(window, event.data, grown),
                0.8 if grown < CALM else 0.2,
                f"the gradient has grown {grown:.1f} times",
            )


def _remedy(window: Window, step: int, skip: str) -> str:
    if window.of_script:
        return f"look at the batch of step {step}"
    command = f"`raydist data show DATASET --job RUN/spec.yaml --step {step}`"
    return f"look at the batch: {command} has its files and texts; recovery.on_nan: {skip} leaves such a batch out"


def _not_finite(window: Window, data: dict[str, Any], grown: float) -> Finding:
    ranks = data.get("ranks") or []
    where = ", ".join(f"rank {one['rank']}, micro-batch {one.get('micro_batch')}" for one in ranks[:3])
    return Finding(
        rule="bad_batch",
        rank=None,
        severity="critical",
        what=f"{data['cause']}: the steps before were calm, so it is the data" + (f" ({where})" if where else ""),
        figures={"kind": f"not finite {data['step']}", "step": data["step"], "gradient_growth": grown},
        remedy=_remedy(window, data["step"], "skip"),
        symptom="loss",
        cause="the samples of that batch, or the hardware of that rank",
        culprit={
            "step": data["step"],
            "samples_hash": data.get("samples_hash", ""),
            "ranks": [one.get("rank") for one in ranks],
        },
        evidence=[figure("gradient's growth over the last 50 steps", grown, "steps: grad_norm")],
    )
