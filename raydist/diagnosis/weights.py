"""Weights or gradients are not what they should be: replicas that drifted apart, parameters without a gradient.

Runs anywhere: plain python. The verdicts are those of the checks in the ranks (train.check_replicas, train.check_gradients).
"""

from __future__ import annotations

from collections.abc import Iterator

from raydist.diagnosis._window import Window
from raydist.records import Finding

ONCE = True
CAUSE = "replicas differ, or gradients are missing, zero or not finite"
LOOKS = "events replica_drift and gradients"
THRESHOLDS = {
    "difference": ("none: bits are compared", "replicas compute the same sums (docs/explanation/sharding.md)")
}
_GRADIENTS = {
    "missing": "the parameter is not used in the forward pass",
    "zero": "the gradient vanishes before it reaches this parameter",
    "not_finite": "numbers overflow in the backward pass of this parameter",
    "differs": "ranks have summed different gradients",
}


def check(window: Window) -> Iterator[Finding]:
    """Each once."""
    for event in window.fresh:
        data = event.data
        if event.kind == "replica_drift":
            ranks = data["ranks"]
            yield Finding(
                rule="weights",
                rank=ranks[0] if len(ranks) == 1 else None,
                severity="critical",
                what=f"step {data['step']}: weights of ranks {', '.join(map(str, ranks))} differ in {', '.join(data['tensors'])}",
                figures={"kind": f"drift {data['step']}", "tensors": data["count"]},
                remedy="have the hardware of that rank tested (dcgmi diag -r 3, memtest), and keep train.check_replicas on",
                cause="a bit flipped in memory, or a kernel is not deterministic",
                culprit={"ranks": ranks, "parameter": data["tensors"][0]},
                evidence=[{"figure": "tensors that differ", "value": data["count"], "from": "event: replica_drift"}],
                confidence=0.9,
            )
        elif event.kind == "gradients":
            problem = data["problems"][0]
            yield Finding(
                rule="weights",
                rank=problem["ranks"][0] if len(problem["ranks"]) == 1 else None,
                severity="warning",
                what=f"step {data['step']}: the gradient of {problem['parameter']} is {problem['problem'].replace('_', ' ')}"
                + (f", and {data['count'] - 1} more" if data["count"] > 1 else ""),
                figures={"kind": f"gradients {data['step']}", "count": data["count"]},
                remedy="check the model for an unused parameter, a detach() or a broken backward pass at that parameter",
                cause=_GRADIENTS.get(problem["problem"], problem["problem"]),
                culprit={"parameter": problem["parameter"], "ranks": problem["ranks"]},
                evidence=[{"figure": "parameters with a problem", "value": data["count"], "from": "event: gradients"}],
                confidence=0.8,
            )
