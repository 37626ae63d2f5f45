"""raydist.worker.parallel.hsdp: the default mesh."""

from __future__ import annotations

import os
from typing import Any

import pytest

from raydist.worker.distributed import Rank
from raydist.worker.mesh import Mesh
from raydist.worker.parallel.hsdp import Strategy
from tests.training import job


def mesh_of(rank: Rank, sizes: list[int]) -> list[list[int]]:
    """The mesh that this rank builds, on a node of `sizes[rank]` ranks."""
    os.environ["LOCAL_WORLD_SIZE"] = str(sizes[rank.rank])
    try:
        return Strategy(job("hsdp"), Mesh(rank)).devices().mesh.tolist()
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


@pytest.mark.parametrize(
    ("sizes", "mesh"),
    [([2, 2, 2, 2], [[0, 1], [2, 3]]), ([3, 3, 3, 1], [[0], [1], [2], [3]]), ([4, 4, 4, 4], [[0, 1, 2, 3]])],
)
def test_every_rank_builds_the_same_mesh(ranks: Any, sizes: list[int], mesh: list[list[int]]) -> None:
    """Groups lie within nodes, and every rank sees the same ones, also if nodes have different numbers of ranks."""
    assert ranks.run(mesh_of, len(sizes), sizes) == [mesh] * len(sizes)
