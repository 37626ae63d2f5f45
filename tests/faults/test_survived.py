"""Every class of fault, injected into one run: it ends with the bits of an undisturbed run, and its events name each fault.

Over a minute: 19 attempts, each ended by a fault of its own.

One run, because a restart takes a second and a driver ten. The faults happen in the order of their steps. Between two that end an
attempt there is a checkpoint, because a run without progress is stopped.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from raydist.cgroups import cgroup
from raydist.faults import (
    Abort,
    BadNumber,
    BusyStorage,
    ClockJump,
    CpuHog,
    CpuQuota,
    CutUpload,
    DamageCheckpoint,
    DamageMessage,
    Deadlock,
    DiskFull,
    DriverClockJump,
    Exit,
    Fault,
    FlipBit,
    Garbage,
    HangingStorage,
    HoldGil,
    Kill,
    KillAgent,
    KillDriver,
    KillMonitor,
    KillProcess,
    Leak,
    LearningRate,
    LossSpike,
    MemoryHog,
    NoDescriptors,
    NoInodes,
    NoProcesses,
    OneWayCut,
    OutOfMemory,
    Pause,
    Raise,
    Reading,
    ReadOnly,
    ScaleActivations,
    ScaleGradient,
    Segfault,
    SkipCollective,
    SlowData,
    SlowDisk,
    SlowNetwork,
    SlowRank,
    SlowStorage,
    StaleStorage,
    StorageGone,
    StuckData,
    Suspend,
    SuspendProcess,
    UnmountedStorage,
)
from tests.exact import exact
from tests.faults.conftest import GPT, LONG, STEPS, write

DEATHS: list[tuple[Fault, str, str]] = [
    (Kill(rank=1, step=2), "worker_died", "SIGKILL"),
    (Segfault(rank=0, step=4, phase="backward"), "worker_died", "SIGSEGV"),
    (Abort(rank=1, step=5, phase="update"), "worker_died", "SIGABRT"),
    (Exit(rank=0, step=7, code=3), "user_error", "ended with SystemExit: 3"),
    (Raise(rank=1, step=8, message="a bug in the model"), "user_error", "InjectedError: a bug in the model"),
    (Suspend(rank=1, step=13), "worker_hung", r"stopped (SIGSTOP); in step 13 for \d+ s in forward"),
    (HoldGil(rank=0, step=18, phase="backward"), "worker_hung", r"holds the GIL; in step 18 for \d+ s in backward"),
    (Deadlock(rank=1, step=23, phase="update"), "worker_hung", r"in step 23 for \d+ s in update"),
    (OutOfMemory(rank=0, step=26), "out_of_memory", "emory"),
]
"""The fault; the kind of its event `failure`, and a part of the cause."""

HICCUPS: list[Fault] = [
    DiskFull(rank=1, step=9, operations=1),
    CutUpload(rank=1, step=15, operations=1),
    BusyStorage(rank=1, step=27, operations=1),
    NoInodes(rank=1, step=54, operations=1),
    StorageGone(rank=1, step=20, operations=1),
    # For two seconds, in which the save of step 27 is completed. In step 26, where an attempt ends, the loader may be at 29.
    StuckData(rank=1, step=30),
    ReadOnly(rank=0, step=30, operations=1),
    SlowStorage(step=31, delay=0.1, seconds=0.3),
    Pause(rank=1, step=32, seconds=0.1, gap=0.1, stops=2),
    CpuHog(rank=0, step=33, seconds=0.2, processes=1),
    SlowData(rank=0, step=34, seconds=0.2),
    ClockJump(rank=0, step=10, seconds=-3600.0),
    ClockJump(rank=1, step=14, seconds=3600.0),
    ClockJump(rank=0, step=11, seconds=3600.0, process="agent"),
    ClockJump(rank=1, step=34, seconds=-3600.0, process="agent"),
    DriverClockJump(step=33, seconds=3600.0),
    DriverClockJump(step=50, seconds=-7200.0),
    SuspendProcess(rank=1, step=14, process="agent", seconds=0.5),
    SuspendProcess(rank=0, step=15, process="monitor", seconds=0.5),
    SuspendProcess(rank=0, step=16, process="coordinator", seconds=0.5),
    SuspendProcess(rank=1, step=17, process="raylet", seconds=0.5),
    SuspendProcess(rank=0, step=19, process="gcs", seconds=0.5),
    StaleStorage(rank=1, step=24, operations=1),
    HangingStorage(rank=0, step=32, seconds=0.3),
    NoDescriptors(rank=0, step=52, seconds=0.3),
    UnmountedStorage(rank=1, step=57, operations=1),
    SlowNetwork(rank=1, step=33, seconds=0.3, bytes_per_s=1 << 16),
    OneWayCut(rank=1, step=49, seconds=0.3),
    SlowDisk(rank=0, step=33, seconds=0.3, bytes_per_s=1 << 18),
    Garbage(rank=1, step=34, objects=1000),
    Leak(rank=1, step=35, steps=3),
    SlowRank(rank=0, step=35, seconds=0.05, steps=2),
    # In which the save of step 18 ends: else that of 21 may not begin before the deadlock.
    SlowRank(rank=1, step=19, seconds=1.0),
    # In which the monitor stores the earlier events, as it does every 2 s: a driver that is killed takes along what is not stored.
    SlowRank(rank=0, step=58, seconds=4.0),
    ScaleGradient(step=24, factor=1.0),
    ScaleActivations(step=24, factor=1.0),
    LearningRate(step=25, factor=1.0),
    Reading(rank=1, step=36, column="gpu_pcie_width", value=4),
    KillProcess(rank=0, step=51, process="monitor", lack_of_memory=True),
]
"""Faults after which the attempt continues."""
if (group := cgroup("cpu")) is not None and os.access(group.mount, os.W_OK):  # root may not either, in a container
    HICCUPS.append(CpuQuota(rank=0, step=35, seconds=0.2, cpus=0.5))
if os.geteuid() or ((group := cgroup("pids")) is not None and os.access(group.mount, os.W_OK)):
    HICCUPS.append(NoProcesses(rank=1, step=51, phase="save", seconds=0.3))

DAMAGED = {"torn": 36, "truncated": 39, "flipped": 42, "missing": 45, "manifest": 48}
"""The kind of damage -> the checkpoint's step. The checkpoint is damaged two steps later."""

REST: list[Fault] = [
    KillAgent(rank=0, step=52),  # no rank is at step 54 by then, at whose end a save fails
    KillMonitor(step=55),
    KillDriver(step=59),
]

PATIENCE = [
    "--set",
    "recovery.step_timeout=10",
    "--set",
    "recovery.data_timeout=2",
    "--set",
    "checkpoint.max_failures=9",
]


def damage() -> list[Fault]:
    """Each checkpoint of DAMAGED is damaged after its commit; then the rank that damaged it is killed."""
    found: list[Fault] = []
    for what, step in DAMAGED.items():
        found += [DamageCheckpoint(step=step + 2, checkpoint=step, what=what), Kill(rank=0, step=step + 2)]
    return found


EVERY = [fault for fault, _, _ in DEATHS] + HICCUPS + damage() + REST
NEVER = Kill(rank=1, step=7, phase="eval")
"""That step has no evaluation."""


@pytest.fixture(scope="module")
def disturbed(project: Any) -> Any:
    """The run with all faults, to its end: its driver is killed near the end, and the same command runs again."""
    command = ["train", "job.yaml", "--name", "disturbed", *LONG, *PATIENCE, *write(project, "every", [*EVERY, NEVER])]
    first = project.raydist(*command)
    assert first.returncode == -9, first.stderr
    lost = project.show("disturbed")
    assert (lost["status"], lost["workers"]) == ("lost", []), "no rank outlives its driver"
    second = project.warm(*command)
    assert second.returncode == 0, second.stderr
    return project


def test_the_same_bits(disturbed: Any, undisturbed: dict[str, Any]) -> None:
    """Each step once, with the loss, norm and samples of the undisturbed run; all weights, the optimizer's state and the eval
    loss are equal too. Clocks that jump by an hour make no start an hour long."""
    shown = disturbed.show("disturbed")
    assert exact(disturbed.steps("disturbed")) == undisturbed["rows"]
    assert disturbed.weights("disturbed", STEPS) == undisturbed["weights"]
    assert (shown["status"], shown["eval_loss"]) == ("finished", undisturbed["eval_loss"])
    assert max(event["seconds"] for event in disturbed.events("disturbed", "first_step")) < 1800


def test_each_fault_happens_once_and_has_an_event(disturbed: Any) -> None:
    """Each fault happens once in the run, over all attempts and both drivers; events.jsonl and `raydist show` have them in the
    order of their steps."""
    asked = sorted(
        (fault.step, fault.fault, rank) for fault in EVERY for rank in ([0, 1] if fault.rank is None else [fault.rank])
    )
    told = disturbed.events("disturbed", "fault")
    assert sorted((e["step"], e["fault"], e["rank"]) for e in told) == asked
    assert len({e["note"] for e in told}) == len(asked)
    shown = disturbed.show("disturbed")["faults"]
    assert sorted((f["step"], f["fault"], f["rank"]) for f in shown) == asked
    assert [f["at"] for f in shown] == sorted(f["at"] for f in shown)
    (missing,) = (n["text"] for n in disturbed.events("disturbed", "note") if "has not happened" in n["text"])
    assert missing.startswith("the fault kill of rank 1 in step 7, at its phase eval, has not happened")


def test_every_death_names_the_rank_and_the_cause(disturbed: Any) -> None:
    """Each fault that ends an attempt has one failure, in order, with the rank that it was injected on. Out of memory, the run
    keeps its shapes, which decide bits, and recomputes activations."""
    failures = disturbed.events("disturbed", "failure")
    killed = [(fault, "worker_died", "SIGKILL") for fault in damage() if isinstance(fault, Kill)]
    expected = [*DEATHS, *killed, (REST[0], "worker_died", "SIGKILL")]
    assert [(f["rank"], f["fault"]) for f in failures] == [(fault.rank, kind) for fault, kind, _ in expected]
    for failure, (_, _, cause) in zip(failures, expected, strict=True):
        assert re.search(cause.replace("(", r"\(").replace(")", r"\)"), failure["cause"]), failure["cause"]
    smaller = ("micro_batch", "max_tokens", "checkpoint_activations")
    decided = [[event.get(field) for field in smaller] for event in disturbed.events("disturbed", "decision")]
    assert [fields for fields in decided if any(fields)] == [[None, None, "full"]]


def test_storage_that_fails_costs_a_checkpoint(disturbed: Any) -> None:
    """The save in that step failed, on that rank and for that reason; the next one was committed."""
    # On a busy machine step 21, whose save has failed before, is still being saved again when the storage of step 24 is stale.
    failed = {
        (e["step"], e["cause"].endswith("Stale file handle")): e
        for e in disturbed.events("disturbed", "checkpoint_failed")
        if "Connection" not in e["cause"] and "Too many open files" not in e["cause"]
    }
    told = [(e["rank"], e["cause"].rpartition(": ")[2]) for _, e in sorted(failed.items())]
    expected = [
        (1, "No space left on device"),
        (1, "Broken pipe"),
        (1, "Input/output error"),
        (1, "Stale file handle"),
        (1, "503 Slow Down"),
        (0, "Read-only file system"),
    ]
    last = [(1, "No space left on device"), (1, "its run's folder is gone; is its file system mounted?")]
    # The driver may be killed before it is told of the last one.
    assert told[: len(expected)] == expected
    assert told[len(expected) :] in (last, last[:1])
    due = ({9}, {15}, {18, 21}, {21, 24}, {27}, {30})
    assert [step in of for (step, _), of in zip(sorted(failed), due, strict=False)] == [True] * len(due)
    committed = {e["step"] for e in disturbed.events("disturbed", "checkpoint_saved")}
    assert {12, 33, STEPS} <= committed


def test_damaged_checkpoints_are_rejected(disturbed: Any) -> None:
    """Each damaged checkpoint is rejected with its problem, and training resumes from the one before."""
    rejected = [e for e in disturbed.events("disturbed", "checkpoint_rejected") if "too late" not in e["cause"]]
    why = [
        "not those that were written",
        "instead of",
        "not those that were written",
        "is missing",
        "does not end with the hash",
    ]
    assert [e["step"] for e in rejected] == list(DAMAGED.values())
    for event, cause in zip(rejected, why, strict=True):
        assert re.search(cause, event["cause"]), event["cause"]
    resumed = [e["step"] for e in disturbed.events("disturbed", "resumed")]
    assert [step - 3 in resumed for step in DAMAGED.values()] == [True] * len(DAMAGED)


def test_a_stuck_loader_is_started_again(disturbed: Any) -> None:
    """The event has the rank, the step, and the line at which the loader's thread blocks; no attempt ends."""
    # On a busy machine a loader may take as long in another step.
    (stalled,) = (event for event in disturbed.events("disturbed", "data_stalled") if event["step"] == 30)
    assert (stalled["rank"], stalled["final"]) == (1, False)
    assert "injector.py" in stalled["where"]


NUMBERS: list[Fault] = [
    DamageMessage(rank=1, step=1),
    FlipBit(rank=2, step=2),
    BadNumber(rank=1, step=4, where="loss"),
    BadNumber(rank=0, step=6, value="inf"),
    LossSpike(rank=5, step=8),
    SkipCollective(rank=1, step=9),
    OutOfMemory(rank=0, step=10),
    MemoryHog(rank=2, step=11, limit_mb=100),
    Raise(rank=1, step=12, times=3),
]


def test_bad_numbers_lack_of_memory_and_a_crash_loop(project: Any) -> None:
    """Faults that change the numbers or end the run, on three replicas of two pipeline stages (the embedding is tied, so both
    stages have it): a message that is damaged ends the attempt; a replica that differs is repaired; bad steps are skipped, and the
    event names the ranks; a rank that skips a collective is named as the cause of the hang; each lack of memory halves the
    micro-batch; a bug that is raised three times in a row stops the run, with exit code 3."""
    policy = ["recovery.on_nan=skip", "recovery.spike.factor=3", "recovery.spike.window=3", "recovery.step_timeout=10"]
    fields = [*policy, "train.check_replicas=1", "cluster.workers=6", "train.global_batch=12", "train.micro_batch=4",
              "parallel.pipeline=2", "model.layers=2", "cluster.cpus_per_worker=0.3"]  # fmt: skip
    command = [word for field in fields for word in ("--set", field)]
    done = project.warm("train", "job.yaml", "--name", "numbers", *GPT, *command, *write(project, "numbers", NUMBERS))
    assert done.returncode == 3, done.stderr
    bad = project.events("numbers", "non_finite")
    assert [(e["step"], e["action"], [r["rank"] for r in e["ranks"]]) for e in bad] == [
        (4, "skip", [1, 4]),
        (6, "skip", [0]),
    ]
    (drift,) = project.events("numbers", "replica_drift")
    assert (drift["step"], drift["ranks"], drift["majority"], drift["action"]) == (3, [2], [0, 1, 3, 4, 5], "repair")
    (spike,) = project.events("numbers", "loss_spike")
    assert (spike["step"], spike["action"]) == (8, "skip")
    failures = project.events("numbers", "failure")
    assert [(f["rank"], f["fault"]) for f in failures] == [
        (1, "communication"),
        (1, "worker_hung"),
        (0, "out_of_memory"),
        (2, "out_of_memory"),
        *[(1, "user_error")] * 3,
    ]
    assert "was damaged on its way" in failures[0]["cause"]
    assert "collectives of group" in failures[1]["cause"]
    micro = [e.get("micro_batch") for e in project.events("numbers", "decision")]
    assert micro == [None, None, 2, 1, None, None, None]
    assert "the same cause 3 times" in done.stderr
    assert [f["rank"] for f in project.show("numbers")["faults"]] == [1, 2, 1, 0, 5, 1, 0, 2, 1, 1, 1]
