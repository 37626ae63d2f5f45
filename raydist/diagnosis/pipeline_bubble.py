"""Ranks of a pipeline wait for much of a step because the micro-batches are few for its stages.

Runs anywhere: plain python. The share is that of the schedule, which the run computes at its start.
"""

from __future__ import annotations

from collections.abc import Iterator

from raydist.diagnosis._symptoms import figure
from raydist.diagnosis._window import Window
from raydist.records import Finding

ONCE = True
CAUSE = "the pipeline has too few micro-batches"
LOOKS = "the bubble of event pipeline"
THRESHOLDS = {
    "bubble": ("0.2 of the passes' time", "four micro-batches for each rank have at most a fifth (docs/how-to/mesh.md)")
}
BUBBLE = 0.2


def check(window: Window) -> Iterator[Finding]:
    """At the start."""
    for event in window.fresh:
        if event.kind != "pipeline" or event.data["bubble"] <= BUBBLE:
            continue
        better = event.data["better"]
        yield Finding(
            rule="pipeline_bubble",
            rank=None,
            severity="info",
            what=f"ranks of the pipeline wait {event.data['bubble']:.0%} of the passes' time",
            figures={"bubble": event.data["bubble"]},
            remedy=" or ".join(f"set {one['set']}, which makes it {one['bubble']:.0%}" for one in better)
            or "raise train.global_batch or lower train.micro_batch, so that a step has more micro-batches",
            cause=f"{event.data['micro_batches']} micro-batches for {event.data['ranks']} ranks",
            culprit={"setting": "train.micro_batch"},
            evidence=[figure("predicted share of waiting", event.data["bubble"], "event: pipeline")],
            confidence=0.9,
            lost=event.data["bubble"],
        )
