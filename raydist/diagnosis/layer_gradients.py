"""The gradient of one layer vanishes or explodes, while those of the others do not.

Runs anywhere: plain python and numpy. From the histograms of the run (observe.histograms), of which the engine gets the root mean
square of each parameter's gradient. Only ratios to the median of all parameters count: gradients shrink and grow together when the
loss does.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydist.diagnosis import layer_activations
from raydist.diagnosis._sizes import IN_A_ROW, PATIENCE, TIMES, TINY, moved, table
from raydist.diagnosis._symptoms import figure
from raydist.diagnosis._window import Window, median
from raydist.records import Finding

CAUSE = "the gradient of a layer vanishes or explodes"
LOOKS = "the root mean square of each parameter's gradient over the median of all parameters, in the last histograms"
THRESHOLDS = {
    "changes": (
        "1000 times the parameter's own median before, up or down, in 3 histograms in a row",
        "240 histograms of two small GPTs: no ratio was more than 140 times from its parameter's median",
    ),
    "history": ("5 histograms before", "a median of fewer is one of the first steps"),
    "no use": (
        "from the start: below 1e-5 of the median in 8 histograms in a row, and below optim.eps where AdamW divides by it",
        "an update is then the gradient over eps, and no longer of the size of the learning rate (Kingma and Ba 2015)",
    ),
}
EPS, LEAST = 1e-8, 3
"""AdamW's own; parameters."""


def check(window: Window) -> Iterator[Finding]:
    """The parameter that is farthest from the others."""
    names, rows = table(window, "gradients")
    if len(rows) < PATIENCE or len(names) < LEAST or not np.isfinite(rows).any(axis=1).all():
        return
    if any(True for _ in layer_activations.check(window)):
        return  # what a layer puts out sets the size of its gradient
    ratios = rows / np.nanmedian(rows, axis=1, keepdims=True)
    most = np.abs(moved(ratios))
    at = int(most.argmax())
    if most[at] >= np.log(TIMES):
        usual = float(median(ratios[:-IN_A_ROW, at][None])[0])
        yield _finding(names[at], float(rows[-1, at]), float(ratios[-1, at]), usual)
        return
    eps = window.setting("optim.eps", EPS)
    late, sizes_ = ratios[-PATIENCE:], rows[-PATIENCE:]
    tiny = (late < TINY).all(axis=0) & (sizes_ < (eps if isinstance(eps, float) else EPS)).all(axis=0)
    if tiny.any():
        at = int(np.where(tiny, late[-1], np.inf).argmin())
        yield _finding(names[at], float(rows[-1, at]), float(ratios[-1, at]), None)


def _finding(name: str, size: float, ratio: float, usual: float | None) -> Finding:
    explodes = usual is not None and ratio > usual
    does = "explodes" if explodes else "vanishes"
    before = f", and was {usual:.2g} times before" if usual is not None else " since the first histograms"
    remedy = (
        "lower optim.lr, set optim.clip, and look at the layer's normalisation and initial weights"
        if explodes
        else "look at what comes after this layer in the forward pass: a saturated activation, a gate that has closed, a missing "
        "residual connection or normalisation, initial weights that are too small"
    )
    return Finding(
        rule="layer_gradients",
        rank=None,
        severity="critical" if explodes else "warning",
        what=f"the gradient of {name} {does}: its root mean square is {size:.2g}, {ratio:.2g} times the median of all "
        f"parameters{before}",
        figures={"kind": name, "size": size, "ratio": ratio},
        remedy=remedy,
        cause=f"the gradient {'grows' if explodes else 'is lost'} on its way back to this layer",
        culprit={"parameter": name},
        evidence=[
            figure("root mean square of its gradient", size, "histograms"),
            figure("over the median of all parameters", ratio, "histograms"),
            figure("the same before, its median", float("nan") if usual is None else usual, "histograms"),
        ],
        others=[
            {
                "cause": "the learning rate is too high",
                "against": "the gradients of the other parameters have not changed with it",
            }
        ],
        confidence=0.8,
    )
