"""The global batch is far beyond the gradient noise scale: a smaller one would learn nearly as much from far fewer tokens.

Runs anywhere: plain python. docs/explanation/noise.md explains the scale. Only in the second half of a run: before, the scale grows
fast.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydist.diagnosis._symptoms import figure
from raydist.diagnosis._window import Window
from raydist.records import NOISE_FAR_BEYOND, NOISE_MEASURED_AT_LEAST, Finding, batch_far_beyond_noise

ONCE = True
CAUSE = "the batch is far beyond the gradient noise scale"
LOOKS = "train.global_batch against grad_noise_scale, in the second half of a run"
THRESHOLDS = {
    "times": (
        f"{NOISE_FAR_BEYOND:g} times the scale",
        "a sequence then contributes a fifth of its maximum (McCandlish et al. 2018)",
    ),
    "measured": (
        f"{NOISE_MEASURED_AT_LEAST} times",
        "the average of fewer is off by more than a factor of two (docs/explanation/noise.md)",
    ),
}


def check(window: Window) -> Iterator[Finding]:
    """Once."""
    batch, total, every = (window.setting(name) for name in ("train.global_batch", "train.steps", "observe.grad_noise"))
    scales = window.steps["grad_noise_scale"]
    if not batch or not total or not every or not len(scales) or np.isnan(scales[-1]):
        return
    step, scale = int(window.steps["step"][-1]), float(scales[-1])
    if 2 * step < total or not batch_far_beyond_noise(batch, scale, step // every):
        return
    scale = max(scale, 1.0)
    times, fits = batch / scale, 1 << max(0, int(scale) - 1).bit_length()
    # The progress of a step is that of an infinite batch over 1 + scale/batch, each at its best learning rate (McCandlish, 2.2).
    progress = (1 + scale / batch) / (1 + scale / fits)
    yield Finding(
        rule="grad_noise",
        rank=None,
        severity="info",
        what=f"the global batch of {batch} sequences is {times:.1f} times the gradient noise scale, {scale:.3g}",
        figures={"global_batch": batch, "grad_noise_scale": scale, "times": times, "batch_that_fits": fits},
        remedy=f"lower train.global_batch: with {fits} a step learns about {progress:.0%} as much from {fits / batch:.1%} of the "
        "tokens; or keep it, if the workers would be idle otherwise, and try a higher optim.lr (docs/explanation/noise.md)",
        cause="the direction of a step is known from far fewer sequences",
        culprit={"setting": "train.global_batch"},
        evidence=[figure("global batch over the noise scale", times, "steps: grad_noise_scale")],
        confidence=0.7,
    )
