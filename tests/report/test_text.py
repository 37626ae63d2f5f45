"""raydist.report.text: numbers and events in readable form."""

from __future__ import annotations

import re
from typing import Any

import pytest

from raydist.records import Event
from raydist.report import text


@pytest.mark.parametrize(
    ("count", "told"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (12_900_000, "12.3 MiB"), (3 * 2**50, "3072.0 TiB")],
)
def test_size(count: int, told: str) -> None:
    """Binary units, one decimal."""
    assert text.size(count) == told


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.0123, "12 ms"),
        (0.412, "0.41 s"),
        (9.94, "9.9 s"),
        (92, "1:32"),
        (7510, "2:05:10"),
        (3 * 86_400 + 14_400, "3d 4:00:00"),
    ],
)
def test_span(seconds: float, told: str) -> None:
    """In the shortest form."""
    assert text.span(seconds) == told


EVENTS: list[tuple[str, dict[str, Any], str]] = [
    (
        "non_finite",
        {"step": 5, "action": "rollback", "cause": "step 5: the loss (nan) is not finite (rank 1: its loss is nan)"},
        "step 5: the loss (nan) is not finite (rank 1: its loss is nan): the run rolls back and skips the batch",
    ),
    (
        "loss_spike",
        {"step": 5, "action": "skip", "loss": 9.0, "median": 2.5},
        "step 5: loss 9.0000, the median before is 2.5000: the step is skipped",
    ),
    (
        "data_stalled",
        {"step": 5, "rank": 1, "seconds": 300.0, "where": "a.py:7 in read\nb.py:9 in batch", "final": False},
        "step 5, rank 1: no batch for 5:00, in a.py:7 in read: its loader is restarted",
    ),
    (
        "fault",
        {
            "fault": "kill",
            "rank": 1,
            "step": 7,
            "asked": {"fault": "kill", "rank": 1, "step": 7, "times": 1, "phase": "eval"},
        },
        "injected at step 7, rank 1: kill (phase eval)",
    ),
    (
        "decision",
        {"action": "restart", "because": "out of memory", "after_s": 0.0, "micro_batch": 4},
        "decision: restart with micro-batch 4: out of memory",
    ),
    ("attempt_started", {"attempt": 1, "world_size": 2, "resume_step": 0}, "attempt 1: 2 workers, from the start"),
    ("attempt_started", {"attempt": 2, "world_size": 1, "resume_step": 50}, "attempt 2: 1 worker, from step 50"),
    (
        "workers",
        {"workers": [{"rank": 0, "host": "a", "node_ip": "10.0.0.1", "pid": 7}]},
        "workers: rank 0 on a (10.0.0.1, pid 7)",
    ),
    ("resumed", {"step": 50, "path": "checkpoints/step-00000050"}, "resumed from step 50 (checkpoints/step-00000050)"),
    ("resumed", {"step": 50}, "resumed from step 50"),
    (
        "first_step",
        {
            "step": 51,
            "attempt": 2,
            "seconds": 2.25,
            "stages": {"detect": 0.01, "tear_down": 0.25, "load": 2.0},
            "repeated_steps": 3,
        },
        "step 51, the first of attempt 2, after 2.3 s: tear down 0.3 s, load 2.0 s; 3 steps trained once more",
    ),
    (
        "checkpoint_saved",
        {"step": 50, "bytes": 12_900_000, "seconds": 0.41, "stall_seconds": 0.012, "best": True},
        "checkpoint at step 50: 12.3 MiB in 0.41 s, training stopped for 12 ms (best so far)",
    ),
    (
        "checkpoint_failed",
        {"step": 50, "rank": 1, "cause": "No space left on device"},
        "checkpoint at step 50 failed, rank 1: No space left on device",
    ),
    (
        "pipeline",
        {
            "ranks": 4,
            "chunks": 1,
            "blocks": [2, 2, 2, 2],
            "micro_batches": 8,
            "bubble": 3 / 11,
            "better": [
                {"set": "train.micro_batch: 1", "bubble": 3 / 19},
                {"set": "parallel.chunks: 2", "bubble": 3 / 19},
            ],
        },
        "pipeline of 4 stages on 4 ranks, 8 micro-batches: ranks wait 27% of the passes' time; train.micro_batch: 1 makes it "
        "16% or parallel.chunks: 2 makes it 16%",
    ),
    (
        "pipeline",
        {"ranks": 2, "chunks": 1, "blocks": [4, 4], "micro_batches": 16, "bubble": 1 / 17, "better": []},
        "pipeline of 2 stages on 2 ranks, 16 micro-batches: ranks wait 6% of the passes' time",
    ),
    ("comm_chosen", {"because": "int8: 40% faster than torch"}, "comm: auto: int8: 40% faster than torch"),
    (
        "checkpoint_rejected",
        {"step": 50, "file": "shard-0.bin", "cause": "is missing"},
        "checkpoint at step 50 is not used: shard-0.bin: is missing",
    ),
    (
        "checkpoint_damaged",
        {"step": 50, "file": "shard-0.bin", "cause": "is missing", "mended_from": "s3://b/run"},
        "checkpoint at step 50 was damaged, repaired from s3://b/run: shard-0.bin: is missing",
    ),
    (
        "checkpoint_damaged",
        {"step": 50, "file": "shard-0.bin", "cause": "is missing", "mended_from": None},
        "checkpoint at step 50 was damaged, and there is no good copy of it: shard-0.bin: is missing",
    ),
    (
        "replica_saved",
        {"replica": "s3://b", "step": 50, "bytes": 12_900_000, "seconds": 0.41},
        "replica s3://b has step 50: 12.3 MiB in 0.41 s",
    ),
    ("replica_failed", {"replica": "s3://b", "cause": "no route"}, "replica s3://b: no route"),
    ("replica_used", {"replica": "s3://b", "step": 50}, "step 50 is loaded from the replica s3://b"),
    (
        "eval",
        {"step": 50, "loss": 2.61234, "tokens": 32768, "best": False},
        "eval at step 50: loss 2.6123 on 32,768 tokens",
    ),
    ("failure", {"attempt": 1, "rank": 1, "cause": "killed by SIGKILL"}, "attempt 1 failed, rank 1: killed by SIGKILL"),
    ("failure", {"attempt": 1, "rank": None, "cause": "startup"}, "attempt 1 failed: startup"),
    ("decision", {"action": "restart", "because": "1 of 3", "after_s": 2.0}, "decision: restart in 2 s: 1 of 3"),
    ("decision", {"action": "stop", "because": "no progress", "after_s": 0.0}, "decision: stop: no progress"),
    (
        "replica_drift",
        {
            "step": 5,
            "action": "repair",
            "ranks": [2],
            "tensors": ["model/a", "model/b"],
            "count": 3,
            "majority": [0, 1],
        },
        "step 5: rank 2 drifted in model/a, model/b and 1 more: repaired from the other ranks",
    ),
    (
        "finding",
        {"rule": "leak", "what": "rank 3: its memory grows", "remedy": "look for what grows", "severity": "warning"},
        "rank 3: its memory grows: look for what grows",
    ),
    ("note", {"text": "cpu: no CUDA device"}, "cpu: no CUDA device"),
    ("ended", {"status": "stopped", "step": 7, "cause": "NaN"}, "stopped at step 7: NaN"),
    ("ended", {"status": "finished", "step": 200}, "finished at step 200"),
]


@pytest.mark.parametrize(
    ("before", "stages", "told"),
    [
        ({}, {"tear_down": 0.104, "build": 0.304, "load": 0.004}, "after 0.41 s: tear down 0.10 s, build 0.31 s"),
        (
            {"job": 0.44, "data": 0.94, "ray": 4.04},
            {"schedule": 0.04, "import": 0.04, "build": 1.54},
            "after 7.0 s: job 0.4 s, data 1.0 s, Ray 4.0 s, schedule 0.1 s, build 1.5 s",
        ),
        ({"data": 130.4}, {"build": 10.4}, "after 141 s: data 130 s, build 11 s"),
    ],
)
def test_the_stages_of_a_first_step_add_up(before: dict[str, float], stages: dict[str, float], told: str) -> None:
    """The shown stages, those before the attempt and the attempt's own, add up to the shown total."""
    data = {"step": 1, "attempt": 1, "seconds": 1.0, "stages": stages, "repeated_steps": 0, "before": before}
    line = text.event(Event("first_step", 1.0, data))
    assert line == f"step 1, the first of attempt 1, {told}"
    whole, *parts = [float(seconds) for seconds in re.findall(r"([\d.]+) s", line)]
    assert sum(parts) == pytest.approx(whole)


@pytest.mark.parametrize(("kind", "data", "told"), EVENTS)
def test_events(kind: str, data: dict[str, Any], told: str) -> None:
    """Each kind is one line."""
    assert text.event(Event(kind, 1.0, data)) == told


@pytest.mark.parametrize("event", [Event("eval", 1.0, {"step": 3}), Event("of_tomorrow", 1.0, {"step": 3})])
def test_events_of_another_version(event: Event) -> None:
    """Unknown events are shown as they are: a display never fails on them."""
    assert text.event(event) == f"{event.kind} {{'step': 3}}"
