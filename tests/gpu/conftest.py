"""Deterministic algorithms in all tests, as set by `train.deterministic`, so that equal bits are guaranteed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read before the first CUDA call


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Restores the setting afterwards."""
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
    torch._dynamo.reset()
