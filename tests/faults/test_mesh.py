"""Faults on a mesh, a pipeline of two stages of two tensor parallel ranks: one run, with the bits of an undisturbed one. Its events
name the rank, although the others of its replica wait for it. SIGKILL and SIGSTOP on the other meshes of four ranks; of each rank
of each mesh: benchmarks/mesh_faults.py. What does not depend on the mesh is in tests/faults/test_survived.py, and so are replicas
that differ, bad numbers and lack of memory; lost nodes: tests/end_to_end/test_nodes.py.

Over a minute: nine attempts of four ranks, and three each on three other meshes.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

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


LAST = 7
OTHERS = {
    "dp 2 x tensor 2": ["model.name=gpt", "parallel.strategy=zero1", "parallel.tensor=2"],
    "dp 2 x pipeline 2": ["model.name=gpt", "parallel.strategy=zero3", "parallel.pipeline=2"],
    "dp 4 with expert 4": ["model.name=mixtral", "model.hidden=16", "parallel.strategy=zero2", "parallel.expert=4"],
}
SMALL = ["model.layers=2", "model.width=16", "model.heads=2", "cluster.workers=4", "cluster.cpus_per_worker=0.5",
         "recovery.step_timeout=5", "recovery.max_failures=-1", "recovery.snapshot_every=1", f"train.steps={LAST}",
         "checkpoint.every=100"]  # fmt: skip


@pytest.mark.parametrize(("mesh", "dies", "stops"), [*zip(OTHERS, (3, 1, 2), (1, 2, 0), strict=True)])
def test_a_rank_dies_and_another_one_stops(project: Any, mesh: str, dies: int, stops: int) -> None:
    """SIGKILL of a rank and SIGSTOP of one that others wait for: each is named, the run goes on from copies in memory, and has the
    bits of one without faults. With experts all routers send all tokens to one of them in the last step."""
    sparse = "expert" in mesh
    name = mesh.replace(" ", "-")
    fields = [word for field in [*OTHERS[mesh], *SMALL] for word in ("--set", field)]
    uneven: list[Fault] = [ExpertImbalance(step=LAST, tokens=1.0)] if sparse else []
    faults = [Kill(rank=dies, step=2, phase="update"), Suspend(rank=stops, step=LAST - 2, phase="backward")]
    project.train(f"{name}-calm", *fields, *write(project, f"{name}-calm", uneven), own_model=False)
    done = project.warm("train", "job.yaml", "--name", name, *fields, *write(project, name, [*faults, *uneven]))
    assert done.returncode == 0, done.stderr
    failures = project.events(name, "failure")
    assert [(f["rank"], f["fault"]) for f in failures] == [(dies, "worker_died"), (stops, "worker_hung")]
    assert ["SIGKILL" in failures[0]["cause"], "stopped (SIGSTOP)" in failures[1]["cause"]] == [True, True]
    assert project.events(name, "resumed")[-1]["source"] == "memory"
    disturbed, undisturbed = project.steps(name), project.steps(f"{name}-calm")
    assert exact(disturbed) == exact(undisturbed)
    assert project.weights(name, LAST) == project.weights(f"{name}-calm", LAST)
    if sparse:
        *_, before, last = (row["expert_loads"][0] for row in undisturbed)
        assert last[0] == sum(last) // 2 > before[0]  # each token takes two
        assert [row["expert_loads"] for row in disturbed] == [row["expert_loads"] for row in undisturbed]
