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
LOOKS = "the loads of the newest expert_loads events"
THRESHOLDS = {
    "events": (
        "5 in a row without a token",
        "with tokens for each expert on average, chance leaves one empty once in e^mean",
    ),
    "tokens": ("32 for each expert on average", "fewer leave experts empty by chance"),
}
EVENTS, TOKENS = 5, 32


def check(window: Window) -> Iterator[Finding]:
    """The layer with the most dead experts."""
    events = window.of("expert_loads")[-EVENTS:]
    if len(events) < EVENTS:
        return
    dead: dict[str, list[int]] = {}
    for name in events[-1].data["layers"]:
        loads = [np.asarray(e.data["layers"].get(name, {}).get("loads", [])) for e in events]
        if len({len(one) for one in loads}) != 1 or not len(loads[0]) or min(one.mean() for one in loads) < TOKENS:
            continue
        found = np.flatnonzero(np.stack(loads).sum(axis=0) == 0)
        if len(found):
            dead[name] = found.tolist()
    if not dead:
        return
    name = max(dead, key=lambda layer: len(dead[layer]))
    count = len(events[-1].data["layers"][name]["loads"])
    yield Finding(
        rule="dead_experts",
        rank=None,
        severity="warning",
        what=f"{len(dead[name])} of {count} experts of {name} had no token in the last {EVENTS} records, in {len(dead)} layers",
        figures={"layers": len(dead), "experts": dead[name][:20]},
        remedy="raise model.options.balance_loss or model.options.bias_rate, or lower optim.lr",
        cause="the router never chooses them",
        culprit={"parameter": name},
        evidence=[figure("experts without a token", float(len(dead[name])), "events: expert_loads")],
        confidence=0.9,
    )
