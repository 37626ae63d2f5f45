"""What compression leaves of the gradients grows: error feedback cannot catch up, and training will suffer.

Runs anywhere: plain python and numpy.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydist.diagnosis._symptoms import figure
from raydist.diagnosis._window import Window
from raydist.records import Finding

ONCE = True
CAUSE = "compression leaves more and more of the gradients"
LOOKS = "residual_norm over grad_norm, means of 50 steps, against the smallest such mean"
THRESHOLDS = {
    "grown": (
        "4 times the smallest mean of 50 steps",
        "what is left is bounded while the compressor keeps up (adr/0018)",
    )
}
WINDOW, GROWN = 50, 4.0


def check(window: Window) -> Iterator[Finding]:
    """Once."""
    left, norms = window.steps["residual_norm"], window.steps["grad_norm"]
    known = np.isfinite(left) & np.isfinite(norms) & (norms > 0)
    if known.sum() < WINDOW:
        return
    ratios = left[known] / norms[known]
    means = np.convolve(ratios, np.full(WINDOW, 1 / WINDOW), mode="valid")
    mean, least = float(means[-1]), float(means.min())
    if mean <= GROWN * least:
        return
    yield Finding(
        rule="compression_error",
        rank=0,
        severity="warning",
        what=f"what compression leaves of the gradient has grown to {mean:.3g} times its norm, from {least:.3g}",
        figures={"step": int(window.steps["step"][-1]), "mean": mean, "least": least},
        remedy="send more of it: comm.compress: int8 or bf16, or a larger ratio or rank",
        cause="the compressor sends too little",
        culprit={"setting": "comm.compress"},
        evidence=[figure("what is left over the gradient's norm", mean, "steps: residual_norm, grad_norm")],
        confidence=0.8,
    )
