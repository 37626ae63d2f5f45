"""The start of an attempt is long because of one of its stages.

Runs anywhere: plain python.
"""

from __future__ import annotations

from collections.abc import Iterator

from raydist.diagnosis._symptoms import figure
from raydist.diagnosis._window import Window
from raydist.records import Finding

ONCE = True
CAUSE = "one stage dominates the start"
LOOKS = "the stages of event first_step"
THRESHOLDS = {
    "seconds": (
        "120 s in one stage",
        "restarts of a healthy cluster take under a minute; below two a run hardly notices",
    ),
    "share": ("0.5 of the start", "else no single stage is to blame"),
}
SECONDS, SHARE = 120.0, 0.5
_REMEDY = {
    "schedule": "the cluster had no room for the workers: free it, or start fewer (cluster.workers)",
    "import": "Python's imports are slow: put the environment on a local disk of each node",
    "rendezvous": "the ranks could not reach each other: check the network between hosts, `raydist bench comm`",
    "build": "the model is built slowly: build it on the meta device, or load weights from faster storage",
    "load": "the checkpoint is read slowly: keep recovery.snapshot_every on, or use faster storage",
    "first_step": "the first step compiles: set TORCHINDUCTOR_CACHE_DIR to a folder that stays, or train.compile: false",
    "data": "prepare the data ahead: `raydist data prepare`",
    "detect": "a failure was detected late: lower recovery.step_timeout",
    "decide": "the run waited for nodes: see recovery.wait_for_nodes, recovery.backoff_s and cluster.spares",
}


def check(window: Window) -> Iterator[Finding]:
    """Of the newest start."""
    for event in window.fresh:
        if event.kind != "first_step":
            continue
        stages = {**event.data.get("before", {}), **event.data["stages"]}
        name = max(stages, key=lambda stage: stages[stage], default="")
        whole = sum(stages.values())
        if not name or stages[name] < SECONDS or stages[name] < SHARE * whole:
            continue
        yield Finding(
            rule="slow_start",
            rank=None,
            severity="info",
            what=f"attempt {event.data['attempt']} started in {whole:.0f} s, {stages[name]:.0f} s of it in {name}",
            figures={"kind": name, "seconds": whole, "stage_seconds": stages[name]},
            remedy=_REMEDY.get(name, "see docs/reference/records.md, stages of a start"),
            cause=f"the stage {name}",
            culprit={"setting": name},
            evidence=[figure(f"seconds in {stage}", seconds, "event: first_step") for stage, seconds in stages.items()],
            confidence=0.9,
        )
