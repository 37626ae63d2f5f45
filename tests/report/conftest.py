"""A run folder as a driver leaves it, for the tests of the code that reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raydist import faults
from raydist.checkpoint.manifest import FileEntry, Manifest, path
from raydist.observe.run_monitor import RunMonitor
from raydist.records import Event, StepRecord
from raydist.run.directory import SPEC, RunDir, manifest_name


def steps(first: int, last: int, attempt: int, world_size: int = 2) -> list[dict[str, Any]]:
    """Records of 100 tokens in 0.1 s; the first one of an attempt takes 5 s."""
    return [
        StepRecord(
            s, 1 / s, 1e-3, 0.5, 100, 5.0 if s == first else 0.1, 0.01, world_size, attempt, f"{s:016x}"
        ).to_dict()
        for s in range(first, last + 1)
    ]


def event(kind: str, **data: Any) -> dict[str, Any]:
    """An event as it is pushed."""
    return Event(kind, 5.0, data).to_dict()


def commit(run: RunDir, step: int, sizes: list[int], eval_loss: float | None = None) -> None:
    """A committed checkpoint: only its manifest."""
    files = {f"shard-{i}.bin": FileEntry(size, "0" * 32) for i, size in enumerate(sizes)}
    run.storage.write(
        path(step, manifest_name(1)), Manifest(step, 2, 1, 5.0, "spec", files, {}, eval_loss=eval_loss).dumps()
    )


FAULT = {"fault": "kill", "rank": 1, "step": 71, "attempt": 1, "at": 4.0}
STARTUP = {"seconds": 2.25, "stages": {"detect": 0.25, "load": 2.0}, "repeated_steps": 20}


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., tuple[RunDir, RunMonitor]]:
    """Makes a run: attempt 1 trained 70 steps and failed, attempt 2 resumed from 50 and trained to 80. The run has not ended."""

    def make(name: str = "a-run") -> tuple[RunDir, RunMonitor]:
        run = RunDir(tmp_path / name)
        run.storage.write(SPEC, b"name: a-run\n")
        watch = RunMonitor(run.uri, interval_s=60.0)
        watch.begin_attempt(1, 2, 0)
        watch.push(steps(1, 70, 1), [event("eval", step=50, loss=2.5, tokens=64)])
        commit(run, 50, [1000, 24], 2.5)
        watch.push([], [event("eval", step=60, loss=2.0, tokens=64)])
        note = {**FAULT, "by": "rank", "asked": {}}
        run.storage.write(faults.note("00000071-kill-0-1", rank=1, time=1), json.dumps(note).encode())
        watch.push(
            [], [event("failure", attempt=1, rank=1, cause="killed by SIGKILL", fault="worker_died", traceback="")]
        )
        watch.begin_attempt(2, 1, 50)
        watch.push(
            steps(51, 80, 2, 1), [event("workers", workers=[{"rank": 0, "host": "h", "node_ip": "10.0.0.1", "pid": 7}])]
        )
        watch.push([], [event("first_step", attempt=2, step=51, **STARTUP)])
        commit(run, 80, [2000], 2.6)
        watch.flush()
        watch._store_state()
        return run, watch

    return make
