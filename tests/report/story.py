"""A run as its monitor writes it, with known times in seconds: two ranks, a fault, a restart, an evaluation.

0      attempt 1 begins                       96     the failure is detected: rank 1 has made no progress since 94.5
9-59   steps 1 to 50, one second each         97     attempt 2 begins, from step 50
59-64  evaluation (4 s), checkpoint (1 s)     102    step 51 has been repeated
64-94  steps 51 to 80                         131    step 80 has been repeated; steps 81 to 200 follow
                                              253    the end, two seconds after step 200
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from raydist.records import Event, Finding, StepRecord
from raydist.run.directory import SPEC, RunDir
from raydist.run.driver_process import this_process
from raydist.run.log_writer import RunLog
from raydist.run.status import write_state
from raydist.run.telemetry_log import TelemetryLog

T = 1_700_000_000.0
GIB = 1 << 30
PARTS = {
    "compute": 0.7 * 200,
    "exposed": 0.2 * 200,
    "data": 0.1 * 200,
    "eval": 4.0,
    "checkpoint": 1.0,
    "recovery": 131 - 94.5,
    "startup": 9.0,
    "other": 0.5 + 2,
    "unknown": 0.0,
}
"""The parts of the 253 seconds."""
LEAK = Finding(
    "leak", 1, "warning", "rank 1: process memory has grown by 20%", {"kind": "rss"}, "look for lists that only grow"
)


def event(at: float, kind: str, **data: Any) -> Event:
    """`at` is in seconds since the run began."""
    return Event(kind, T + at, data)


def begun(at: float, attempt: int, resume: int = 0) -> Event:
    """The start of an attempt with two ranks."""
    return event(at, "attempt_started", attempt=attempt, world_size=2, resume_step=resume)


def first(at: float, attempt: int, step: int, seconds: float, again: int = 0) -> Event:
    """Its first step has ended."""
    stages = {"detect": 1.0, "first_step": 1.0} if again else {"first_step": 1.0}
    return event(at, "first_step", attempt=attempt, step=step, seconds=seconds, stages=stages, repeated_steps=again)


def failed(at: float, attempt: int, cause: str = "killed by SIGKILL") -> Event:
    """A failure by rank 1's death."""
    return event(at, "failure", attempt=attempt, rank=1, cause=cause, fault="worker_died", traceback="", echoes=1)


def events() -> list[Event]:
    """All events of the run."""
    told = {"rank": 0, "host": "h0", "node_ip": "10.0.0.1", "pid": 7, "python": "3.11.9", "torch": "2.13.0"}
    fault = {"fault": "kill", "rank": 1, "step": 81, "attempt": 1, "asked": {}, "note": "faults/x.json"}
    return [
        begun(0, 1),
        event(8, "workers", workers=[told]),
        event(8, "capacity", flops_per_token=1e6, peak_flops=1e9),
        first(10, 1, 1, 10.0),
        event(63, "eval", step=50, loss=2.5, tokens=64),
        event(64, "checkpoint_saved", step=50, bytes=1000, seconds=2.0, stall_seconds=1.0),
        Finding.event(LEAK, T + 70),
        event(94.5, "fault", **fault),
        failed(96, 1),
        event(96.5, "decision", action="restart", because="failure 1 (of 3)", after_s=0.0),
        begun(97, 2, 50),
        event(98, "checkpoint_rejected", step=60, file="shard-0.bin", cause="has another hash"),
        event(99, "resumed", step=50),
        first(102, 2, 51, 7.5, again=30),
        event(253, "ended", status="finished", step=200),
    ]


def steps(first: int, last: int, attempt: int, **values: Any) -> list[dict[str, Any]]:
    """One second, 100 tokens and 16 samples each, 4 samples in each 25th; the loss of step 150 is far above the others, and that of
    step 160 is NaN.

    The gradient noise scale is known from step 100 on, at every tenth step.
    """
    losses = {150: 90.0, 160: math.nan}
    return [
        StepRecord(
            s, losses.get(s, 1 + 1 / s), 1e-3, 0.5, 100, **{"seconds": 1.0, "data_seconds": 0.1, **values},
            world_size=2, attempt=attempt, samples_hash=f"{s:016x}",
            grad_noise_scale=s / 10 if s >= 100 and s % 10 == 0 else None, samples=16 if s % 25 else 4,
        ).to_dict()
        for s in range(first, last + 1)
    ]  # fmt: skip


def reading(at: float, rank: int, attempt: int, step: int, done: int, **values: Any) -> dict[str, Any]:
    """A rank that has trained `done` steps of its attempt: rank 0 computes for 0.6 s of each, rank 1 for 0.8 s."""
    compute, exposed = ((0.6, 0.3), (0.8, 0.1))[rank]
    return {
        "at": T + at, "kind": "rank", "host": f"h{rank}", "node": f"10.0.0.{rank + 1}", "rank": rank, "attempt": attempt,
        "step": step, "data_seconds": 0.1 * done, "forward_seconds": compute * done, "backward_seconds": exposed * done,
        "all_reduce_count": done, "all_reduce_bytes": done << 20, "all_reduce_wire_bytes": float(done << 20),
        "all_reduce_seconds": 0.5 * done, "all_reduce_exposed_seconds": exposed * done,
        "rss_bytes": GIB + (rank * step << 20), **values,
    }  # fmt: skip


def readings() -> list[dict[str, Any]]:
    """One reading at the end of each step."""
    found = []
    for rank in (0, 1):
        for step in range(1, 81):
            rest = {"eval_seconds": 4.0, "save_seconds": 1.0} if step > 50 else {}
            found.append(reading(9 + step + (5 if rest else 0), rank, 1, step, step, **rest))
        found += [reading(51 + step, rank, 2, step, step - 50) for step in range(51, 201)]
    return found


def write(
    run: RunDir,
    told: Iterable[Event],
    attempts: Iterable[tuple[int, int, list[dict[str, Any]]]],
    rows: Iterable[dict[str, Any]] = (),
    status: str = "finished",
    spec: bytes = b"train: {steps: 200, global_batch: 16}\nobserve: {interval_s: 1.0}\n",
) -> RunDir:
    """Writes a run's folder. `attempts`: number, resume step, and its steps."""
    run.storage.write(SPEC, spec)
    log = RunLog(run)
    for number, resume, records in attempts:
        log.attempt(number, resume)
        log.steps(records)
    told = list(told)
    for one in told:
        log.event(one)
    log.close()
    samples = TelemetryLog(run)
    samples.add(rows)
    samples.flush()
    write_state(
        run, {"status": status, "heartbeat_at": told[-1].at if told else T, "driver": this_process(), "step": 200}
    )
    return run


def story(run: RunDir) -> RunDir:
    """The complete run."""
    return write(run, events(), [(1, 0, steps(1, 80, 1)), (2, 50, steps(51, 200, 2))], readings())
