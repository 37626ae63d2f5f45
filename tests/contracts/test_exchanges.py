"""Every exchange keeps the contract in worker/exchange/__init__.py: the outputs and gradients of all experts on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from raydist import registry
from raydist.worker.distributed import Rank
from raydist.worker.exchange import build
from tests.training import run

EXPERTS, WIDTH, WORLD = 6, 8, 3
COUNTS = [[0, 3, 0, 1, 2, 4], [0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 5, 0]]
"""Of each rank, how many of its rows each expert gets: one rank has none, and the first rank's first expert gets none at all."""

Result = tuple[Tensor, Tensor, Tensor]
"""Outputs, gradients of the rows, and gradients of the experts' weights: of a rank's own ones, or of all."""


def rows_of(rank: int) -> Tensor:
    return torch.randn(sum(COUNTS[rank]), WIDTH, generator=torch.Generator().manual_seed(rank))


def weights() -> Tensor:
    return torch.randn(EXPERTS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(9))


def apply(rows: Tensor, counts: Tensor, of_experts: Tensor) -> Tensor:
    """Each row times the weights of its expert."""
    parts = zip(rows.split(counts.tolist()), of_experts, strict=True)
    return torch.cat([part @ own for part, own in parts])


def exchanged(rank: Rank, name: str) -> tuple[Result, Result, int]:
    """On this rank, twice; and the bytes that it sent the first time."""
    exchange = build(name, dist.group.WORLD)
    found, sent = [], []
    for _ in range(2):
        rows, each = rows_of(rank.rank).requires_grad_(), EXPERTS // WORLD
        own = weights()[rank.rank * each : (rank.rank + 1) * each].requires_grad_()
        made = exchange(rows, torch.tensor(COUNTS[rank.rank]), lambda rows, counts, own=own: apply(rows, counts, own))
        made.square().sum().backward()
        assert rows.grad is not None
        assert own.grad is not None
        found.append((made.detach(), rows.grad, own.grad))
        sent.append(exchange.sent)
    return found[0], found[1], sent[0]


def check(ranks: Any, name: str, tolerance: float = 1e-6, on_rank: Any = exchanged, *more: Any) -> list[int]:
    """Raises AssertionError where a rank's numbers are others; returns the bytes that each rank sent."""
    of_all, right = weights().requires_grad_(), []
    for rank in range(WORLD):
        rows = rows_of(rank).requires_grad_()
        made = apply(rows, torch.tensor(COUNTS[rank]), of_all)
        made.square().sum().backward()
        right.append((made.detach(), rows.grad))
    every = run(ranks, on_rank, WORLD, name, *more)
    close = {"rtol": tolerance, "atol": tolerance * 10}
    for (out, gradient), (one, other, _) in zip(right, every, strict=True):
        torch.testing.assert_close(one[0], out, **close)
        torch.testing.assert_close(one[1], gradient, **close)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), "two runs have the same bits"
    torch.testing.assert_close(torch.cat([one[2] for one, *_ in every]), of_all.grad, **close)
    return [sent for *_, sent in every]


@pytest.mark.parametrize("name", registry.names("exchange"))
def test_numbers_of_one_rank(ranks: Any, name: str) -> None:
    """With a rank without rows, and an expert that gets none."""
    check(ranks, name)


def test_bytes_of_all_to_all(ranks: Any) -> None:
    """Rows go there and come back, and so do their gradients: rank 0 has 7 rows for others and gets 1, and so on."""
    each = EXPERTS // WORLD
    leaving = [sum(c) - sum(c[rank * each : (rank + 1) * each]) for rank, c in enumerate(COUNTS)]
    coming = [
        sum(sum(c[rank * each : (rank + 1) * each]) for i, c in enumerate(COUNTS) if i != rank) for rank in range(WORLD)
    ]
    row = WIDTH * 4
    assert check(ranks, "all_to_all") == [2 * row * (out + into) for out, into in zip(leaving, coming, strict=True)]
