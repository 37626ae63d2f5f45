"""Fixtures of the monitor's tests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from raydist.cluster.session import Session, open_session, worker_environment
from raydist.records import StepRecord
from raydist.run.directory import ATTEMPTS, RunDir


@pytest.fixture(scope="module")
def private_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """A private Ray, whose workers are forked, for one module."""
    root, logs = str(Path(__file__).parents[2]), tmp_path_factory.mktemp("logs")
    with open_session("local", env=worker_environment(), log_dir=logs, python_path=[root]) as opened:
        yield opened


def pid(actor: Any) -> int:
    """The process id of the actor."""
    return int(ray.get(actor.__ray_call__.remote(lambda self: os.getpid())))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """The folder of a run that a driver has begun, and that has no file yet."""
    (tmp_path / "a-run" / ATTEMPTS).mkdir(parents=True)
    return RunDir(tmp_path / "a-run")


@pytest.fixture
def rows() -> Callable[..., list[dict[str, Any]]]:
    """make(steps, attempt): the records of these steps of an attempt."""

    def make(steps: range, attempt: int = 1) -> list[dict[str, Any]]:
        return [
            StepRecord(s, 1 / s, 1e-3, 0.5, 100, 0.1, 0.01, 2, attempt, f"{s:016x}", samples=8).to_dict() for s in steps
        ]

    return make


@pytest.fixture
def push_until_it_is_back() -> Callable[[Any, list[dict[str, Any]]], None]:
    """push(monitor, records): pushes to a monitor that was killed until Ray has started it again."""

    def push(monitor: Any, records: list[dict[str, Any]]) -> None:
        deadline = time.monotonic() + 240
        while True:
            try:
                ray.get(monitor.push.remote(records, []), timeout=30)
                return
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                assert time.monotonic() < deadline, "the monitor did not come back"

    return push
