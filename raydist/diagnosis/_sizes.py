"""The sizes of a run's layers over its histograms (observe.histograms): gradients by parameter, outputs by layer.

Runs anywhere: plain python and numpy. For layer_gradients and layer_activations.
"""

from __future__ import annotations

import numpy as np

from raydist.diagnosis._window import Array, Window, median
from raydist.records import Event

KIND = "layer_sizes"
"""Event for the rules only: `step`; `gradients` and `activations`: root mean squares by the name of the parameter or layer."""
KEPT = 30
"""Histograms that are looked at."""
TIMES, IN_A_ROW, HISTORY, TINY, PATIENCE = 1e3, 3, 5, 1e-5, 8
"""A size that is TIMES its own median before, up or down, in IN_A_ROW histograms, after HISTORY others; and one below TINY of the
median of all in PATIENCE histograms."""


def sizes(event: Event) -> Event:
    """From the event `histograms`: what the rules need of it. Without gradients that are all zero, as of experts without tokens:
    of those train.check_gradients tells."""
    gradients: dict[str, float] = {}
    for name, one in event.data["gradients"].items():
        count = sum(one["counts"])
        if count and one["sum_squares"] > 0:
            gradients[name] = float(np.sqrt(one["sum_squares"] / count))
    outputs = event.data.get("activations", {})
    return Event(KIND, event.at, {"step": event.data["step"], "gradients": gradients, "activations": outputs})


def table(window: Window, what: str) -> tuple[list[str], Array]:
    """Names, and [events, names] of the newest histograms; NaN where one has none."""
    events = window.of(KIND)[-KEPT:]
    names = list(events[-1].data[what]) if events else []
    return names, np.array([[e.data[what].get(name, np.nan) for name in names] for e in events])


def moved(values: Array) -> Array:
    """[events, names] -> [names] the logarithm of how many times as large as before the newest IN_A_ROW are, the least of them; 0
    where they have not all moved one way, and where the history is too short or zero."""
    before = median(values[:-IN_A_ROW].T, HISTORY)
    with np.errstate(divide="ignore"):
        apart = np.log(values[-IN_A_ROW:] / np.where(before > 0, before, np.nan))
    one_way = np.abs(np.sign(apart).sum(axis=0)) == IN_A_ROW
    return np.where(one_way, np.sign(apart[-1]) * np.abs(apart).min(axis=0), 0.0)
