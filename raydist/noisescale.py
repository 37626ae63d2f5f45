"""When a global batch is far beyond the gradient noise scale: a run says so as it trains, and a sweep in the end.

Runs anywhere. Pure. docs/noise.md says what the scale means, raydist/worker/metrics/gradient_noise_scale.py how it is measured.
"""

from __future__ import annotations

SURE = 20
"""Measurements before anybody is told what to do about it."""
FAR = 4.0
"""Times the noise scale at which a batch is far beyond it: a sequence then teaches a fifth of what it could."""


def far_beyond(batch: int, scale: float, measured: int) -> bool:
    """Whether a batch of so many sequences is, by a scale of so many `measured` steps. No scale is of less than a sequence."""
    return measured >= SURE and batch > FAR * max(scale, 1.0)
