"""Faults on a mesh, a pipeline of two stages of two tensor parallel ranks: one run, with the bits of an undisturbed one. Its events
name the rank, although the others of its replica wait for it. What does not depend on the mesh is in tests/faults/test_survived.py,
and so are replicas that differ, bad numbers and lack of memory; lost nodes: tests/end_to_end/test_nodes.py.

Over a minute: nine attempts of four ranks, and five of four ranks that share experts.
"""

from __future__ import annotations

import re
from typing import Any

from raydist.faults import (
    DamageCheckpoint,
    Deadlock,
    ExpertImbalance,
    Fault,
    HoldGil,
    Kill,
    KillAgent,
    SkipCollective,
    StorageGone,
    Suspend,
)
from tests.exact import exact
from tests.faults.conftest import GPT, write

STEPS = 33
MESH = ["model.layers=2", "parallel.tensor=2", "parallel.pipeline=2", "cluster.workers=4", "cluster.cpus_per_worker=0.5",
        "recovery.step_timeout=5", f"train.steps={STEPS}", "checkpoint.keep=100"]  # fmt: skip
DEATHS: list[tuple[Fault, str, str]] = [
    (Kill(rank=3, step=2, phase="backward"), "worker_died", "SIGKILL"),
    (Suspend(rank=2, step=4), "worker_hung", "stopped (SIGSTOP)"),
    (HoldGil(rank=1, step=7, phase="backward"), "worker_hung", "holds the GIL"),
    (Deadlock(rank=0, step=10, phase="forward"), "worker_hung", r"in step 10 for \d+ s in forward"),
    (Deadlock(rank=3, step=13, phase="backward"), "worker_hung", r"in step 13 for \d+ s in backward"),
    (SkipCollective(rank=2, step=16), "worker_hung", "collectives of group"),
    (KillAgent(rank=1, step=19), "worker_died", "SIGKILL"),
    (Kill(rank=2, step=30), "worker_died", "SIGKILL"),
]
"""The fault; the kind of its event `failure`, and a part of the cause."""
DAMAGED = 27
REST: list[Fault] = [
    StorageGone(rank=2, step=21, operations=1),
    DamageCheckpoint(step=29, checkpoint=DAMAGED, what="torn"),
]


def test_faults_of_each_rank_of_a_mesh(project: Any) -> None:
    """Ranks of both stages die or hang: in the step in which one waits for another, the other is named. A save that fails on one
    rank commits nothing, and a damaged checkpoint is rejected."""
    fields = [word for field in MESH for word in ("--set", field)]
    project.train("mesh-no-fault", *GPT, *fields, own_model=False)
    faults = write(project, "mesh", sorted([fault for fault, _, _ in DEATHS] + REST, key=lambda fault: fault.step))
    done = project.warm("train", "job.yaml", "--name", "mesh-faults", *GPT, *fields, *faults)
    assert done.returncode == 0, done.stderr
    failures = project.events("mesh-faults", "failure")
    assert [(f["rank"], f["fault"]) for f in failures] == [(fault.rank, kind) for fault, kind, _ in DEATHS]
    for failure, (_, _, cause) in zip(failures, DEATHS, strict=True):
        assert re.search(cause.replace("(", r"\(").replace(")", r"\)"), failure["cause"]), failure["cause"]
    failed = [e for e in project.events("mesh-faults", "checkpoint_failed") if "Connection" not in e["cause"]]
    assert [(e["rank"], e["step"], e["cause"].rpartition(": ")[2]) for e in failed] == [(2, 21, "Input/output error")]
    assert 21 not in {e["step"] for e in project.events("mesh-faults", "checkpoint_saved")}
    (rejected,) = project.events("mesh-faults", "checkpoint_rejected")
    assert rejected["step"] == DAMAGED
    assert len({e["note"] for e in project.events("mesh-faults", "fault")}) == len(DEATHS) + len(REST)
    assert exact(project.steps("mesh-faults")) == exact(project.steps("mesh-no-fault"))
    assert project.weights("mesh-faults", STEPS) == project.weights("mesh-no-fault", STEPS)


EXPERTS = ["model.name=mixtral", "model.layers=2", "model.width=16", "model.heads=2", "model.hidden=16", "parallel.strategy=zero1",
           "parallel.expert=4", "cluster.workers=4", "cluster.cpus_per_worker=0.5", "recovery.step_timeout=5",
           "recovery.max_failures=-1", "train.steps=22", "checkpoint.keep=100"]  # fmt: skip


def test_each_rank_that_shares_experts_stops(project: Any) -> None:
    """dp 4 with the experts of each layer on all four: SIGSTOP of each rank, while the others wait for its experts. The rank is
    named, and the run has the bits of one that is not stopped. In both, all routers send all tokens to one expert in the last step.
    SIGKILL: tests/worker/test_exactness.py."""
    fields = [word for field in EXPERTS for word in ("--set", field)]
    uneven = ExpertImbalance(step=22, tokens=1.0)
    project.train("experts-no-fault", *fields, *write(project, "uneven", [uneven]), own_model=False)
    undisturbed = project.steps("experts-no-fault")
    *_, before, last = (row["expert_loads"][0] for row in undisturbed)
    assert last[0] == sum(last) // 2 > before[0]  # each token takes two
    # The first steps of an attempt have no time limit.
    faults = [*(Suspend(rank=rank, step=5 + 5 * rank, phase="backward") for rank in range(4)), uneven]
    done = project.warm("train", "job.yaml", "--name", "experts", *fields, *write(project, "experts", faults))
    assert done.returncode == 0, done.stderr
    failures = project.events("experts", "failure")
    assert [(f["rank"], f["fault"]) for f in failures] == [(rank, "worker_hung") for rank in range(4)]
    assert all("stopped (SIGSTOP)" in failure["cause"] for failure in failures)
    disturbed = project.steps("experts")
    assert exact(disturbed) == exact(undisturbed)
    assert [row["expert_loads"] for row in disturbed] == [row["expert_loads"] for row in undisturbed]
    assert project.weights("experts", 22) == project.weights("experts-no-fault", 22)
