"""A jump of the loss: where it begins, how large it is, and whether it goes back. For the rules that ask for its cause.

Runs anywhere: plain python and numpy. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raydist.diagnosis._window import SMOOTH, Array, Window, median

BEFORE, HISTORY, NEWEST, LEAST = 30, 200, 60, 10
SIGMAS, RELATIVE, NORM = 10.0, 0.1, 3.0
"""A jump is SIGMAS times the run's own noise above the median of the BEFORE steps before it, by at least RELATIVE of that median,
and in a step whose gradient is NORM times as large as theirs. LEAST of them must be known. Judged are the steps since the last
look, however many they are, and NEWEST before, whose jumps could not be told from a rise yet."""
OF_FIRST = 0.02
"""And by at least OF_FIRST of the run's first loss: that of a model that has memorized a small dataset jumps in a healthy run, from
0.006 to 0.017, or from 0.0004 to 0.014."""
BACK = 0.3
"""It is back when no more than this share of it is left."""
AGAIN = 3
"""After one bad batch no more of the BEFORE steps that follow are that high: weights that a learning rate drives away need more."""


@dataclass(frozen=True, slots=True)
class Jump:
    """`at`: index in the arrays of the window's steps; `before`, `size`: median loss before, and how far above it; `noise`: of the
    losses; `left`: share of the jump that is left in the newest steps after it, NaN with fewer than three; `steps`: after it;
    `again`: those of them that are not back.
    """

    at: int
    before: float
    size: float
    noise: float
    norm: float
    left: float
    steps: int
    again: int

    @property
    def one_batch(self) -> bool:
        """Whether it is over, and was no more than one batch."""
        return self.left <= BACK and self.again <= AGAIN

    @property
    def many_batches(self) -> bool:
        """Whether it is over, and was more."""
        return self.left <= BACK and self.again > AGAIN


def jump(window: Window) -> Jump | None:
    """The first jump in the newest steps; None if there is none, or too little history."""
    cache = window.steps.cache
    if "jump" not in cache:
        steps = window.steps
        cache["jump"] = _jump(steps["loss"], steps["grad_norm"], steps.first_loss, NEWEST + steps.new)
    found: Jump | None = cache["jump"]
    return found


def _jump(losses: Array, norms: Array, first_loss: float, newest: int) -> Jump | None:
    count = len(losses)
    first = max(count - newest, 2 * LEAST)
    if count <= first:
        return None
    start = max(first - HISTORY, 0)
    middles = _medians_before(losses, start)
    above = losses[start:] - middles
    past = above[: first - start]
    past = past[np.isfinite(past)]
    if len(past) < LEAST:
        return None
    noise = SMOOTH * float(np.median(np.abs(past - np.median(past))))
    recent, usual = above[first - start :], _medians_before(norms, first)
    with np.errstate(divide="ignore", invalid="ignore"):
        times = norms[first:] / usual
        far = recent > np.maximum(SIGMAS * noise, least_rise(middles[first - start :], first_loss))
        hits = np.flatnonzero(far & (times >= NORM) & np.isfinite(losses[first:]))
    if not len(hits):
        return None
    at = first + int(hits[0])
    middle, size = float(middles[at - start]), float(above[at - start])
    after = losses[at + 1 : at + 1 + BEFORE]
    after = after[np.isfinite(after)]
    left = float(np.median(after[-3:]) - middle) / size if len(after) >= 3 else float("nan")
    again = int((after > middle + BACK * size).sum())
    return Jump(at, middle, size, noise, float(times[at - first]), left, len(after), again)


def least_rise(usual: Array, first_loss: float) -> Array:
    """By how much a loss must be above these, whatever the noise. `first_loss`: the run's, NaN if it is not known."""
    return np.fmax(RELATIVE * np.abs(usual), OF_FIRST * abs(first_loss))


def _medians_before(values: Array, start: int) -> Array:
    """For each index from `start`: the median of the finite ones of the BEFORE before it; NaN if they are fewer than LEAST."""
    known = np.concatenate([np.full(BEFORE, np.nan), np.where(np.isfinite(values), values, np.nan)])
    return median(np.lib.stride_tricks.sliding_window_view(known[start:-1], BEFORE), LEAST)


def growth(window: Window) -> float:
    """How many times as large the gradient's norm has become: its median over the last 5 finite steps, over that of the 30 before
    the last 20. 1 if not known."""
    norms = window.steps["grad_norm"]
    norms = norms[np.isfinite(norms)]
    if len(norms) < 50:
        return 1.0
    return float(np.median(norms[-5:]) / max(np.median(norms[-50:-20]), 1e-30))
