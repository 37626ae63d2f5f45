"""A run of a pipeline, from the loop: what it says, and how it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raydist.data.prepare import prepare
from raydist.run.directory import RunDir
from raydist.spec import JobSpec
from raydist.worker.attempt import Job, MonitorChannel
from raydist.worker.distributed import Rank
from raydist.worker.loop import train
from tests.training import run


def trained(rank: Rank, dataset: str, root: str) -> tuple[list[dict[str, Any]], str]:
    """(events, status) of two steps of a pipeline of two ranks."""
    spec = JobSpec.model_validate(
        {
            "data": {"path": dataset},
            "model": {"layers": 4, "width": 16, "heads": 2, "context": 8},
            "train": {"steps": 2, "global_batch": 4, "micro_batch": 2},
            "parallel": {"pipeline": 2},
            "eval": {"every": None},
            "cluster": {"workers": 2},
        }
    )
    events: list[dict[str, Any]] = []
    channel = MonitorChannel(lambda _, told: events.extend(told), lambda: None) if rank.first else None
    return events, train(Job(spec, RunDir(f"{root}/run"), dataset), rank, channel).status


def test_a_run_says_its_bubble(ranks: Any, tmp_path: Path) -> None:
    """Before the first step, once: the schedule of the stages as they are cut, and what would wait less."""
    (tmp_path / "a.txt").write_text("so it goes. " * 200)
    prepare([str(tmp_path / "a.txt")], str(tmp_path / "tokens"), eval_fraction=0.2)
    (events, status), _ = run(ranks, trained, 2, str(tmp_path / "tokens"), str(tmp_path))
    assert status == "finished"
    kinds = [event["kind"] for event in events]
    assert kinds.count("pipeline") == 1
    assert kinds.index("pipeline") < kinds.index("first_step")
    said = next(event for event in events if event["kind"] == "pipeline")
    assert (said["ranks"], said["chunks"], sum(said["blocks"]), said["micro_batches"]) == (2, 1, 4, 2)
    assert said["bubble"] == pytest.approx(1 / 3, abs=0.07)  # of equal stages; the head makes the last one slower
    assert [one["set"] for one in said["better"]] == ["train.micro_batch: 1", "parallel.chunks: 2"]
