"""Faults on a mesh, a pipeline of two stages of two tensor parallel ranks: one run, with the bits of an undisturbed one. Its events
name the rank, although the others of its replica wait for it. SIGKILL and SIGSTOP also on ranks that share experts; of each rank of
each mesh of four: benchmarks/mesh_faults.py, and SIGKILL of each: tests/worker/test_exactness.py; from copies in memory on
dp 2 x tensor 2: tests/end_to_end/test_memory.py. What does not depend on the mesh is in tests/faults/test_survived.py, and so are
replicas that differ, bad numbers and lack of memory; lost nodes: tests/end_to_end/test_nodes.py.

Over a minute: eleven attempts of four ranks.
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

STEPS = 27
MESH = ["model.layers=2", "parallel.tensor=2", "parallel.pipeline=2", "cluster.workers=4", "cluster.cpus_per_worker=0.5",
        "recovery.step_timeout=10", f"train.steps={STEPS}", "checkpoint.keep=100"]  # fmt: skip
DEATHS: list[tuple[Fault, str, str]] = [
    (Kill(rank=3, step=2, phase="backward"), "worker_died", "SIGKILL"),
    (Suspend(rank=0, step=4), "worker_hung", r"stopped (SIGSTOP); in step 4 for \d+ s in forward"),
    (HoldGil(rank=3, step=7, phase="backward"), "worker_hung", r"holds the GIL; in step 7 for \d+ s in backward"),
    (Deadlock(rank=1, step=10, phase="backward"), "worker_hung", r"in step 10 for \d+ s in backward"),
    (SkipCollective(rank=2, step=13), "worker_hung", "collectives of group"),
    (KillAgent(rank=1, step=24), "worker_died", "SIGKILL"),
]
"""The fault; the kind of its event `failure`, and a part of the cause. Each way to hang, in both stages and both passes."""
FAILED, DAMAGED = 15, 21
REST: list[Fault] = [
    StorageGone(rank=2, step=FAILED, operations=1),
    DamageCheckpoint(step=DAMAGED + 2, checkpoint=DAMAGED, what="torn"),
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
    assert [(e["rank"], e["step"], e["cause"].rpartition(": ")[2]) for e in failed] == [
        (2, FAILED, "Input/output error")
    ]
    assert FAILED not in {e["step"] for e in project.events("mesh-faults", "checkpoint_saved")}
    (rejected,) = project.events("mesh-faults", "checkpoint_rejected")
    assert rejected["step"] == DAMAGED
    assert len({e["note"] for e in project.events("mesh-faults", "fault")}) == len(DEATHS) + len(REST)
    assert exact(project.steps("mesh-faults")) == exact(project.steps("mesh-no-fault"))
    assert project.weights("mesh-faults", STEPS) == project.weights("mesh-no-fault", STEPS)


LAST = 16  # on a busy machine a copy in memory takes as long as some of these steps
EXPERTS = ["model.name=mixtral", "model.hidden=16", "parallel.strategy=zero2", "parallel.expert=4"]
SMALL = ["model.layers=2", "model.width=16", "model.heads=2", "cluster.workers=4", "cluster.cpus_per_worker=0.5",
         "recovery.step_timeout=10", "recovery.max_failures=-1", "recovery.snapshot_every=1", f"train.steps={LAST}",
         "checkpoint.every=100"]  # fmt: skip


def test_a_rank_dies_and_another_one_stops(project: Any) -> None:
    """Of four that share the experts: SIGKILL of a rank and SIGSTOP of one that others wait for. Each is named, and the run goes on
    from copies in memory, with the bits of one without faults. In the last step all routers send all tokens to one of the ranks."""
    fields = [word for field in [*EXPERTS, *SMALL] for word in ("--set", field)]
    uneven: list[Fault] = [ExpertImbalance(step=LAST, tokens=1.0)]
    faults = [Kill(rank=2, step=2, phase="update"), Suspend(rank=0, step=LAST - 2, phase="backward")]
    project.train("experts-calm", *fields, *write(project, "experts-calm", uneven), own_model=False)
    done = project.warm(
        "train", "job.yaml", "--name", "experts", *fields, *write(project, "experts", [*faults, *uneven])
    )
    assert done.returncode == 0, done.stderr
    failures = project.events("experts", "failure")
    assert [(f["rank"], f["fault"]) for f in failures] == [(2, "worker_died"), (0, "worker_hung")]
    assert ["SIGKILL" in failures[0]["cause"], "stopped (SIGSTOP)" in failures[1]["cause"]] == [True, True]
    assert project.events("experts", "resumed")[-1]["source"] == "memory"
    disturbed, undisturbed = project.steps("experts"), project.steps("experts-calm")
    assert exact(disturbed) == exact(undisturbed)
    assert project.weights("experts", LAST) == project.weights("experts-calm", LAST)
    *_, before, last = (row["expert_loads"][0] for row in undisturbed)
    assert last[0] == sum(last) // 2 > before[0]  # each token takes two
    assert [row["expert_loads"] for row in disturbed] == [row["expert_loads"] for row in undisturbed]
