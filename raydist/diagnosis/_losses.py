"""A jump of the loss: where it begins, how large it is, and whether it goes back. For the rules that ask for its cause.

Runs anywhere: plain python and numpy. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raydist.diagnosis._window import SMOOTH, Array, Window

BEFORE, HISTORY, NEWEST = 30, 200, 60
SIGMAS, RELATIVE, NORM = 10.0, 0.1, 3.0
"""A jump is SIGMAS times the run's own noise above the median of the BEFORE steps before it, by at least RELATIVE of that median,
and in a step whose gradient is NORM times as large as theirs."""
BACK = 0.3
"""It is back when no more than this share of it is left."""


@dataclass(frozen=True, slots=True)
class Jump:
    """`at`: index in the arrays of the window's steps; `before`, `size`: median loss before, and how far above it; `noise`: of the
    losses; `left`: share of the jump that is left in the newest steps after it, NaN with fewer than three; `steps`: after it.
    """

    at: int
    before: float
    size: float
    noise: float
    norm: float
    left: float
    steps: int


def jump(window: Window) -> Jump | None:
    """The first jump in the NEWEST steps; None if there is none, or too little history."""
    if "jump" not in window.cache:
        window.cache["jump"] = _jump(window.steps["loss"], window.steps["grad_norm"])
    found: Jump | None = window.cache["jump"]
    return found


def _jump(losses: Array, norms: Array) -> Jump | None:
    count = len(losses)
    first = max(count - NEWEST, 2 * BEFORE)
    if count <= first:
        return None
    start = max(first - HISTORY - BEFORE, 0)
    views = np.lib.stride_tricks.sliding_window_view(
        losses[start:], BEFORE
    )  # the steps before index start + BEFORE + i
    middles = np.median(views, axis=1)[:-1] if len(views) > 1 else np.empty(0)
    above = losses[start + BEFORE :] - middles
    offset = start + BEFORE
    for at in range(first, count):
        past = above[max(at - HISTORY - offset, 0) : at - offset]
        past = past[np.isfinite(past)]
        if len(past) < BEFORE or not np.isfinite(losses[at]):
            continue
        noise = SMOOTH * float(np.median(np.abs(past - np.median(past))))
        middle, size = float(middles[at - offset]), float(above[at - offset])
        usual = float(np.nanmedian(norms[at - BEFORE : at]))
        times = float(norms[at]) / max(usual, 1e-30)
        if size <= max(SIGMAS * noise, RELATIVE * abs(middle)) or not times >= NORM:
            continue
        after = losses[at + 1 : at + 1 + BEFORE]
        after = after[np.isfinite(after)]
        left = float(np.median(after[-3:]) - middle) / size if len(after) >= 3 else float("nan")
        return Jump(at, middle, size, noise, times, left, len(after))
    return None


def growth(window: Window) -> float:
    """How many times as large the gradient's norm has become: its median over the last 5 finite steps, over that of the 30 before
    the last 20. 1 if not known."""
    norms = window.steps["grad_norm"]
    norms = norms[np.isfinite(norms)]
    if len(norms) < 50:
        return 1.0
    return float(np.median(norms[-5:]) / max(np.median(norms[-50:-20]), 1e-30))
