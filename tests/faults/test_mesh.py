"""Faults that end an attempt, on a mesh: a pipeline of two stages of two tensor parallel ranks. One run, with the bits of an
undisturbed one; its events name the rank, although the others of its replica wait for it.
"""

from __future__ import annotations

import re
from typing import Any

from raydist.faults import Deadlock, Fault, HoldGil, Kill, KillAgent, Segfault, SkipCollective, Suspend
from tests.exact import exact
from tests.faults.conftest import GPT, write

MESH = ["model.layers=2", "parallel.tensor=2", "parallel.pipeline=2", "cluster.workers=4", "cluster.cpus_per_worker=0.5",
        "recovery.step_timeout=3", "train.steps=24", "checkpoint.keep=100"]  # fmt: skip
DEATHS: list[tuple[Fault, str, str]] = [
    (Kill(rank=3, step=2, phase="backward"), "worker_died", "SIGKILL"),
    (Segfault(rank=0, step=4, phase="backward"), "worker_died", "SIGSEGV"),
    (Suspend(rank=2, step=7), "worker_hung", "stopped (SIGSTOP)"),
    (HoldGil(rank=1, step=10, phase="backward"), "worker_hung", "holds the GIL"),
    (Deadlock(rank=0, step=13, phase="forward"), "worker_hung", "in step 13 for . s in forward"),
    (Deadlock(rank=3, step=16, phase="backward"), "worker_hung", "in step 16 for . s in backward"),
    (SkipCollective(rank=2, step=19), "worker_hung", "collectives of group"),
    (KillAgent(rank=1, step=22), "worker_died", "SIGKILL"),
]
"""The fault; the kind of its event `failure`, and a part of the cause."""


def test_faults_of_each_rank_of_a_mesh(project: Any) -> None:
    """Ranks of both stages die or hang: in the step in which one waits for another, the other is named."""
    fields = [word for field in MESH for word in ("--set", field)]
    project.train("mesh-no-fault", *GPT, *fields, own_model=False)
    faults = write(project, "mesh", [fault for fault, _, _ in DEATHS])
    shown = project.train("mesh-faults", *GPT, *fields, *faults, own_model=False)
    assert shown["status"] == "finished"
    failures = project.events("mesh-faults", "failure")
    assert [(f["rank"], f["fault"]) for f in failures] == [(fault.rank, kind) for fault, kind, _ in DEATHS]
    for failure, (_, _, cause) in zip(failures, DEATHS, strict=True):
        assert re.search(cause.replace("(", r"\(").replace(")", r"\)"), failure["cause"]), failure["cause"]
    assert exact(project.steps("mesh-faults")) == exact(project.steps("mesh-no-fault"))
    assert project.weights("mesh-faults", 24) == project.weights("mesh-no-fault", 24)
