"""Experts that get no tokens: the router does not use a part of the model's parameters.

Runs anywhere: plain python and numpy.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raydist.diagnosis._symptoms import figure
from raydist.diagnosis._window import Window
from raydist.records import Finding

CAUSE = "experts get no tokens"
LOOKS = "the loads of the newest steps, ten apart"
THRESHOLDS = {
    "records": (
        "5 in a row without a token, of steps that are 10 or more apart",
        "with tokens for each expert on average, chance leaves one empty once in e^mean",
    ),
    "tokens": ("32 for each expert on average", "fewer leave experts empty by chance"),
}
RECORDS, TOKENS = 5, 32


def check(window: Window) -> Iterator[Finding]:
    """The layer with the most dead experts."""
    loads, dead = window.steps.loads.newest(RECORDS), dict[str, list[int]]()
    for name, of_layer in loads.items():
        found = np.flatnonzero(of_layer.sum(axis=0) == 0)
        if len(of_layer) == RECORDS and len(found) and of_layer.mean(axis=1).min() >= TOKENS:
            dead[name] = found.tolist()
    if not dead:
        return
    name = max(dead, key=lambda layer: len(dead[layer]))
    count = loads[name].shape[1]
    yield Finding(
        rule="dead_experts",
        rank=None,
        severity="warning",
        what=f"{len(dead[name])} of {count} experts of {name} had no token in the last {RECORDS} records, in {len(dead)} layers",
        figures={"layers": len(dead), "experts": dead[name][:20]},
        remedy="raise model.options.balance_loss or model.options.bias_rate, or lower optim.lr",
        cause="the router never chooses them",
        culprit={"parameter": name},
        evidence=[figure("experts without a token", float(len(dead[name])), "steps: expert_loads")],
        confidence=0.9,
    )
