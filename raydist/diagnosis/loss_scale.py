"""In fp16, step after step overflows: the loss scale falls, and no update is applied.

Runs anywhere: plain python and numpy. A step that overflows has a finite loss and a gradient that is not finite.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydist.diagnosis._symptoms import figure
from raydist.diagnosis._window import Window
from raydist.records import Finding

CAUSE = "gradients overflow fp16, and the loss scale collapses"
LOOKS = "steps with a finite loss whose gradient is not finite"
THRESHOLDS = {
    "overflows": ("5 of 20 steps", "a loss scale that grows every 2000 good steps overflows once in that many"),
    "start": ("20 steps", "the first steps find the scale: each halves it"),
}
NEWEST, LEAST, START = 20, 5, 20


def check(window: Window) -> Iterator[Finding]:
    """While it lasts."""
    losses, norms = window.steps["loss"], window.steps["grad_norm"]
    if len(losses) < START + NEWEST or window.setting("precision.params", "fp16") != "fp16":
        return
    if not np.isfinite(norms).any():  # they are not recorded
        return
    over = np.isfinite(losses[-NEWEST:]) & ~np.isfinite(norms[-NEWEST:]) & (window.steps["tokens"][-NEWEST:] > 0)
    count = int(over.sum())
    if count < LEAST:
        return
    yield Finding(
        rule="loss_scale",
        rank=None,
        severity="critical",
        what=f"{count} of the last {NEWEST} steps overflowed fp16: their updates were not applied, "
        "and the loss scale was halved each time",
        figures={"overflows": count, "scale_fell_times": float(2.0**count)},
        remedy="set precision.params: bf16, whose range is that of fp32; or lower "
        f"{window.named('optim.lr')} or {window.named('optim.clip')}",
        cause="the gradients are too large for fp16",
        culprit={"setting": "precision.params"},
        evidence=[
            figure(f"overflows in the last {NEWEST} steps", float(count), "steps: grad_norm not finite, loss finite")
        ],
        confidence=0.9,
        lost=count / NEWEST,
    )
