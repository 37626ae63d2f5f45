"""Every class of fault of one node, on a mesh: a pipeline of two stages of two tensor parallel ranks. One run, with the bits of an
undisturbed one; its events name the rank, although the others of its replica wait for it. Replicas that differ, bad numbers and
lack of memory: tests/faults/test_survived.py. Lost nodes: tests/end_to_end/test_nodes.py.

Over a minute: 15 attempts of four ranks, and nine of four ranks that share experts.
"""

from __future__ import annotations

import re
from typing import Any

from raydist.faults import (
    Abort,
    DamageCheckpoint,
    Deadlock,
    DiskFull,
    Exit,
    Fault,
    HoldGil,
    Kill,
    KillAgent,
    KillDriver,
    KillMonitor,
    Raise,
    ReadOnly,
    Segfault,
    SkipCollective,
    SlowData,
    SlowRank,
    SlowStorage,
    StorageGone,
    StuckData,
    Suspend,
)
from tests.exact import exact
from tests.faults.conftest import GPT, write

STEPS = 63
MESH = ["model.layers=2", "parallel.tensor=2", "parallel.pipeline=2", "cluster.workers=4", "cluster.cpus_per_worker=0.5",
        "recovery.step_timeout=3", "recovery.data_timeout=1", f"train.steps={STEPS}", "checkpoint.keep=100"]  # fmt: skip
DEATHS: list[tuple[Fault, str, str]] = [
    (Kill(rank=3, step=2, phase="backward"), "worker_died", "SIGKILL"),
    (Segfault(rank=0, step=4, phase="backward"), "worker_died", "SIGSEGV"),
    (Suspend(rank=2, step=7), "worker_hung", "stopped (SIGSTOP)"),
    (HoldGil(rank=1, step=10, phase="backward"), "worker_hung", "holds the GIL"),
    (Deadlock(rank=0, step=13, phase="forward"), "worker_hung", "in step 13 for . s in forward"),
    (Deadlock(rank=3, step=16, phase="backward"), "worker_hung", "in step 16 for . s in backward"),
    (SkipCollective(rank=2, step=19), "worker_hung", "collectives of group"),
    (KillAgent(rank=1, step=22), "worker_died", "SIGKILL"),
    (Abort(rank=2, step=25, phase="update"), "worker_died", "SIGABRT"),
    (Exit(rank=3, step=28, code=3), "user_error", "ended with SystemExit: 3"),
    (Raise(rank=1, step=31, message="a bug in the model"), "user_error", "InjectedError: a bug in the model"),
    (Kill(rank=2, step=54), "worker_died", "SIGKILL"),
]
"""The fault; the kind of its event `failure`, and a part of the cause."""
DAMAGED = 51
REST: list[Fault] = [
    StuckData(rank=0, step=38),
    DiskFull(rank=1, step=33, operations=1),
    StorageGone(rank=2, step=39, operations=1),
    ReadOnly(rank=3, step=45, operations=1),
    SlowStorage(step=40, delay=0.1, seconds=0.3),
    SlowData(rank=0, step=41, seconds=0.2),
    SlowRank(rank=2, step=43, seconds=0.05, steps=2),
    DamageCheckpoint(step=53, checkpoint=DAMAGED, what="torn"),
    KillMonitor(step=56),
    KillDriver(step=61),
]


def test_faults_of_each_rank_of_a_mesh(project: Any) -> None:
    """Ranks of both stages die or hang: in the step in which one waits for another, the other is named. A save that fails on one
    rank commits nothing, a damaged checkpoint is rejected, and the run is taken up again after its driver is killed."""
    fields = [word for field in MESH for word in ("--set", field)]
    project.train("mesh-no-fault", *GPT, *fields, own_model=False)
    faults = write(project, "mesh", sorted([fault for fault, _, _ in DEATHS] + REST, key=lambda fault: fault.step))
    command = ["train", "job.yaml", "--name", "mesh-faults", *GPT, *fields, *faults]
    first = project.raydist(*command)
    assert first.returncode == -9, first.stderr
    assert project.show("mesh-faults")["status"] == "lost"
    second = project.warm(*command)
    assert second.returncode == 0, second.stderr
    failures = project.events("mesh-faults", "failure")
    assert [(f["rank"], f["fault"]) for f in failures] == [(fault.rank, kind) for fault, kind, _ in DEATHS]
    for failure, (_, _, cause) in zip(failures, DEATHS, strict=True):
        assert re.search(cause.replace("(", r"\(").replace(")", r"\)"), failure["cause"]), failure["cause"]
    (stalled,) = project.events("mesh-faults", "data_stalled")
    assert (stalled["rank"], stalled["step"]) == (0, 38)
    failed = [e for e in project.events("mesh-faults", "checkpoint_failed") if "Connection" not in e["cause"]]
    why = ["No space left on device", "Input/output error", "Read-only file system"]
    assert [(e["rank"], e["cause"].rpartition(": ")[2]) for e in failed] == list(zip((1, 2, 3), why, strict=True))
    (rejected,) = project.events("mesh-faults", "checkpoint_rejected")
    assert rejected["step"] == DAMAGED
    noted = len({e["note"] for e in project.events("mesh-faults", "fault")})
    assert noted == len(DEATHS) + len(REST) + 3, "slow storage has one on each of four ranks"
    assert exact(project.steps("mesh-faults")) == exact(project.steps("mesh-no-fault"))
    assert project.weights("mesh-faults", STEPS) == project.weights("mesh-no-fault", STEPS)


EXPERTS = ["model.name=mixtral", "model.layers=2", "model.width=16", "model.heads=2", "model.hidden=16", "parallel.strategy=zero1",
           "parallel.expert=4", "cluster.workers=4", "cluster.cpus_per_worker=0.5", "recovery.step_timeout=3",
           "recovery.max_failures=-1", "train.steps=36", "checkpoint.keep=100"]  # fmt: skip


def test_each_rank_that_shares_experts_stops_or_dies(project: Any) -> None:
    """dp 4 with the experts of each layer on all four: SIGSTOP, then SIGKILL of each rank, while the others wait for its experts.
    The rank is named, and the run has the bits of an undisturbed one."""
    fields = [word for field in EXPERTS for word in ("--set", field)]
    project.train("experts-no-fault", *fields, own_model=False)
    faults: list[Fault] = [Suspend(rank=rank, step=2 + 4 * rank, phase="backward") for rank in range(4)]
    faults += [Kill(rank=rank, step=18 + 4 * rank, phase="forward") for rank in range(4)]
    done = project.warm("train", "job.yaml", "--name", "experts", *fields, *write(project, "experts", faults))
    assert done.returncode == 0, done.stderr
    failures = project.events("experts", "failure")
    assert [(f["rank"], f["fault"]) for f in failures] == [
        *((rank, "worker_hung") for rank in range(4)),
        *((rank, "worker_died") for rank in range(4)),
    ]
    assert all("stopped (SIGSTOP)" in failure["cause"] for failure in failures[:4])
    assert exact(project.steps("experts")) == exact(project.steps("experts-no-fault"))
    assert project.weights("experts", 36) == project.weights("experts-no-fault", 36)
