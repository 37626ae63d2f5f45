"""Checkpoints made in the test's own process."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from raydist.records import Event
from raydist.run.directory import RunDir
from raydist.worker.checkpoint.save import Saver


class OneRank:
    """A run with a Saver of one rank, and its events."""

    def __init__(self, folder: Path | str, **options: Any) -> None:
        self.run = RunDir(folder)
        self.events: list[Event] = []
        given = {"asynchronous": False, "keep": 10, "attempt": 1, "spec_hash": "abc", "numbers": {"lr": 0.1}, **options}
        self.saver = Saver(self.run, rank=0, world_size=1, group=None, on_event=self.events.append, **given)

    def save(self, step: int, tensors: Mapping[str, Tensor] | None = None, **plain: Any) -> bool:
        """`start`, with a state that depends on the step."""
        return self.saver.start(step, state(step) if tensors is None else tensors, own(step), {"step": step, **plain})

    def kinds(self) -> list[str]:
        return [e.kind for e in self.events]


def state(step: int) -> dict[str, Tensor]:
    """A few tensors of several dtypes and shapes; every value depends on the step."""
    return {
        "model/matrix": torch.arange(600_000, dtype=torch.float32).reshape(600, 1000) + step,
        "model/bf16": torch.full((7, 3), step, dtype=torch.bfloat16),
        "model/scalar": torch.tensor(step, dtype=torch.int64),
        "model/none": torch.zeros(0, 5),
        "model/flags": torch.arange(11) % 2 == step % 2,
        "optim/matrix/step": torch.tensor(float(step)),
        # Not contiguous: a checkpoint stores it in row-major order.
        "optim/matrix/exp_avg": torch.arange(12.0).reshape(3, 4).t() * step,
    }


def own(step: int) -> dict[str, Tensor]:
    """A tensor of this rank alone."""
    return {"extra/own/state": torch.full((100,), step % 256, dtype=torch.uint8)}


def empty() -> dict[str, Tensor]:
    """Zero tensors into which `state` is loaded."""
    return {n: torch.zeros_like(t) for n, t in state(1).items()}


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[n], t) for n, t in expected.items())


@pytest.fixture
def kit() -> Any:
    """The helpers above, for tests of this folder."""
    return sys.modules[__name__]
