"""An attempt stopped: a hang, a loader that never returned, a rank that ran out of memory. The verdicts of the run's own watchers.

Runs anywhere: plain python. A hang's verdict is that of raydist.diagnosis._hang, from the stacks and collectives of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from raydist.diagnosis._symptoms import figure
from raydist.diagnosis._window import Window
from raydist.records import Event, Finding

ONCE = True
CAUSE = "an attempt stopped: a hang, or no memory"
LOOKS = "events failure and data_stalled, with the verdict on all ranks' stacks and collectives"
THRESHOLDS = {
    "hang": ("10 s, or 5 times the 99th percentile of a step", "raydist/ipc/heartbeat.py; recovery.step_timeout"),
}
_REMEDIES = {
    "worker_hung": "RUN/logs/attempt-* has the stacks and the collectives of every rank: compare those of this rank with another's",
    "out_of_memory": "lower {micro_batch}, or use {strategy}: zero2 or zero3",
    "communication": "check the network between these hosts: `raydist bench comm`",
}
_OF_A_JOB = ", or offload.optimizer: cpu; `raydist doctor RUN` says which fits"
_HOLDS = ("parameters", "gradients", "optimizer", "activations", "anon")
"""Columns of what fills a rank's memory."""
_HELD = (
    ("its process is stopped", "a signal or a debugger stopped the process"),
    ("state D", "a storage call does not return"),
    ("its collective", "ranks call different collectives: a branch that not all of them take"),
    ("it has started", "ranks call different numbers of collectives: a branch that not all of them take"),
    ("holds the GIL", "native code holds Python's GIL"),
    ("it is behind", "its own code does not go on"),
)


def check(window: Window) -> Iterator[Finding]:
    """Each once."""
    for event in window.fresh:
        if event.kind == "failure" and event.data.get("fault") in _REMEDIES:
            yield _failure(window, event)
        elif event.kind == "data_stalled":
            yield _stalled(window, event.data)


def _failure(window: Window, event: Event) -> Finding:
    data: dict[str, Any] = event.data
    fault, rank = str(data["fault"]), data.get("rank")
    causes = {
        "out_of_memory": "its tensors need more memory than there is",
        "communication": "its peers do not reach it",
    }
    cause = causes.get(fault) or next(
        (words for part, words in _HELD if part in data["cause"]), "its code does not go on"
    )
    known = window.who("rank", rank) if fault == "out_of_memory" and rank in window.keys("rank") else {}
    held = {name: float(known[f"{name}_bytes"]) for name in _HOLDS if known.get(f"{name}_bytes") is not None}
    return Finding(
        rule="stopped",
        rank=rank,
        severity="critical",
        what=f"attempt {data['attempt']} stopped: {data['cause']}",
        figures={"kind": f"{fault} {data['attempt']}"},
        remedy=_REMEDIES[fault].format(
            micro_batch=window.named("train.micro_batch"), strategy=window.named("parallel.strategy")
        )
        + (_OF_A_JOB if fault == "out_of_memory" and not window.of_script else ""),
        cause=cause,
        culprit=window.culprit(rank),
        evidence=[
            {"figure": "verdict", "value": data["cause"], "from": "event: failure"},
            *(
                figure(f"bytes of its {name}, step {known.get('step')}", size, "telemetry")
                for name, size in held.items()
            ),
            *(found for side in data.get("sides") or [] for found in _side(side)),
        ],
        confidence=0.8,
    )


def _side(side: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Where one of the two ranks of a hang is, and its collective."""
    if side["where"]:
        yield {
            "figure": f"line of rank {side['rank']}",
            "value": side["where"],
            "from": "the stack of its training thread",
        }
    if side["collective"]:
        value = f"{side['collective']}, number {side['number']} of group {side['group']}"
        yield {"figure": f"collective of rank {side['rank']}", "value": value, "from": "torch's flight recorder"}


def _stalled(window: Window, data: dict[str, Any]) -> Finding:
    files = list(data.get("files") or [])
    return Finding(
        rule="stopped",
        rank=data["rank"],
        severity="warning",
        what=f"rank {data['rank']} has had no batch for {data['seconds']:.0f} s, in step {data['step']}",
        figures={"kind": f"data {data['step']}", "seconds": data["seconds"]},
        remedy=f"check the storage of these files, move the data closer, or raise {window.named('data.prefetch')}",
        cause="a call of the storage or of the loader does not return",
        culprit={"rank": data["rank"], **({"file": files[0]} if files else {})},
        evidence=[
            {
                "figure": "innermost line of the loader",
                "value": data["where"].partition("\n")[0],
                "from": "event: data_stalled",
            }
        ],
        confidence=0.9,
    )
