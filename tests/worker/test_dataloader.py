"""Batches of a rank on a GPU, as far as a CPU can tell: which calls are made, in place of CUDA's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from raydist.data.batches import Cursor, MicroBatch, StepBatch
from raydist.worker.dataloader import Feed, sent
from raydist.worker.mesh import Mesh
from tests.training import alone

CUDA = torch.device("cuda", 1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is called, in order."""
    made: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made.append(("device", device)))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: (made.append("pinned"), self)[1])
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, **how: (made.append((device, how)), self)[1])
    return made


def test_the_loader_s_thread_uses_the_rank_s_device(calls: list[Any]) -> None:
    """For each piece of pinned memory torch asks CUDA whether copies from it have ended. A new thread has the first GPU, where such
    a call would take memory for each rank of the node."""
    feed = object.__new__(Feed)
    feed._device, feed._mesh = CUDA, Mesh(alone())
    rows = np.zeros((1, 4), dtype=np.int64)
    feed.to_torch(StepBatch(Cursor(), Cursor(), np.zeros(1, dtype=np.int64), "", [MicroBatch(rows, rows)], 4))
    assert calls == [("device", CUDA), "pinned", "pinned"]


@pytest.mark.parametrize(("device", "pinned"), [(CUDA, ["pinned"]), (torch.device("cpu"), [])])
def test_the_host_does_not_wait_for_a_copy(calls: list[Any], device: torch.device, pinned: list[str]) -> None:
    """Tensors of a user's own loop are pinned first: from other memory the copy waits for all that the GPU has to do."""
    sent(torch.zeros(3), device)
    assert calls == [*pinned, (device, {"non_blocking": True})]
