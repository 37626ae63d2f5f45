"""The output of one layer vanishes or explodes.

Runs anywhere: plain python and numpy. From the sizes of layers' outputs in the steps with histograms (observe.histograms). A layer
is compared with itself: what comes after it may follow it, so the first one in the order of the model is named.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydist.diagnosis._sizes import IN_A_ROW, PATIENCE, TIMES, TINY, moved, table
from raydist.diagnosis._symptoms import figure
from raydist.diagnosis._window import Window, median
from raydist.records import Finding

CAUSE = "the output of a layer vanishes or explodes"
LOOKS = "the root mean square of each layer's output over its own median before, and over the median of all layers"
THRESHOLDS = {
    "changes": (
        "1000 times the layer's own median before, up or down, in 3 histograms in a row, after 5 others",
        "a layer whose weights begin at zero grows less in that time (docs/explanation/doctor.md)",
    ),
    "no use": (
        "from the start: below 1e-5 of the median of all layers in 8 histograms in a row",
        "less than the rounding of a sum in bf16, 2^-8, and of most in fp32: what is added to it does not change",
    ),
}
LEAST, FIRST = 3, 0.5
"""Layers; and once one has changed that much, the share of it, as a logarithm, at which an earlier one has changed with it."""


def check(window: Window) -> Iterator[Finding]:
    """The first such layer in the order of the model."""
    names, rows = table(window, "activations")
    if len(rows) < PATIENCE or len(names) < LEAST or np.isnan(rows).all(axis=1).any():
        return
    change = moved(rows)
    if (np.abs(change) >= np.log(TIMES)).any():
        way = np.sign(change[int(np.abs(change).argmax())])
        far = np.flatnonzero(way * change >= FIRST * np.log(TIMES))  # one that follows may pass the limit sooner
        at = int(far[0])
        usual = float(median(rows[:-IN_A_ROW, at][None])[0])
        yield _finding(names[at], float(rows[-1, at]), usual, len(far) - 1)
        return
    late = rows[-PATIENCE:] / np.nanmedian(rows[-PATIENCE:], axis=1, keepdims=True)
    tiny = np.flatnonzero((late < TINY).all(axis=0))
    if len(tiny):
        yield _finding(names[int(tiny[0])], float(rows[-1, tiny[0]]), None, len(tiny) - 1)


def _finding(name: str, size: float, usual: float | None, more: int) -> Finding:
    explodes = usual is not None and size > usual
    does = "explodes" if explodes else "vanishes"
    before = f", and was {usual:.2g} before" if usual is not None else " since the first histograms"
    also = f"; so do {more} other layers" if more else ""
    remedy = (
        "lower optim.lr, set optim.clip, and look at the weights of this layer and at the normalisation of its input"
        if explodes
        else "look at this layer's weights and at what comes before it: a saturated or dead activation, a gate that has closed, "
        "initial weights that are too small, weight decay on a layer that needs none"
    )
    return Finding(
        rule="layer_activations",
        rank=None,
        severity="critical" if explodes else "warning",
        what=f"the output of {name} {does}: its root mean square is {size:.2g}{before}{also}",
        figures={"kind": name, "size": size, "layers": more + 1},
        remedy=remedy,
        cause=f"the layer's output {'grows without limit' if explodes else 'is next to nothing'}",
        culprit={"parameter": name},
        evidence=[
            figure("root mean square of its output", size, "histograms: activations"),
            figure("the same before, its median", float("nan") if usual is None else usual, "histograms: activations"),
        ],
        others=[
            {
                "cause": "a layer before it",
                "against": "it is the first in the order of the model whose output has changed like this",
            }
        ],
        confidence=0.8,
    )
