"""The coordinates of ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from raydist.errors import UserError
from raydist.worker.comm import gloo_p2p
from raydist.worker.comm.groups import another
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.distributed import Rank
from raydist.worker.mesh import Mesh
from tests.training import MODEL, alone, mesh_job, run


def mesh(rank: int, world: int, **sizes: int) -> Mesh:
    return Mesh(replace(alone(), rank=rank, world_size=world), **sizes)


def test_without_other_axes_the_data_coordinate_is_the_rank() -> None:
    """With data parallelism only, every rank reads its own part and counts its own loss."""
    for rank in range(5):
        made = mesh(rank, 5)
        assert (made.data_rank, made.data_size, made.counts) == (rank, 5, True)
        assert made.sizes == {"pipeline": 1, "data": 5, "context": 1, "tensor": 1}


def test_coordinates_with_every_axis() -> None:
    """16 ranks as (pipeline 2, data 2, context 2, tensor 2): tensor innermost; each coordinate belongs to one rank."""
    found = [mesh(rank, 16, pipeline=2, context=2, tensor=2).coordinate(rank) for rank in range(16)]
    assert found == [(p, d, c, t) for p in range(2) for d in range(2) for c in range(2) for t in range(2)]


def test_the_ranks_of_a_replica() -> None:
    """They read the same part; one tensor rank of the last stage counts the loss."""
    meshes = [mesh(rank, 8, pipeline=2, tensor=2) for rank in range(8)]
    assert [made.data_rank for made in meshes] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [rank for rank, made in enumerate(meshes) if made.counts] == [4, 6]


def test_context_is_data_to_a_strategy() -> None:
    """dp 2 x context 2 x tensor 2: two replicas read samples, a strategy splits over four, and each counts its tokens once."""
    meshes = [mesh(rank, 8, context=2, tensor=2) for rank in range(8)]
    assert [(made.data_rank, made.context_rank) for made in meshes[::2]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [rank for rank, made in enumerate(meshes) if made.counts] == [0, 2, 4, 6]


def of_axes(rank: Rank) -> list[tuple[bool, bool]]:
    """Of the groups along tensor and data and another one, of ranks of which the last is on another node: whether it is known to be
    within one node, and whether it has the time limit of the world's."""
    rank = replace(rank, node_ip="10.0.0.1" if rank.rank < 3 else "10.0.0.2")
    made = Mesh(rank, tensor=2)
    made.connect(gather_json(rank.node_ip, rank.control))
    *groups, world = [
        (group in gloo_p2p._within_node, group._get_backend(rank.device).options._timeout)
        for group in (made.group("tensor"), made.group("data"), another(range(rank.world_size)), dist.group.WORLD)
        if group is not None
    ]
    return [(near, limit == world[1]) for near, limit in groups]


def test_groups_of_an_axis(ranks: Any) -> None:
    """Each has the time limit of the world's, not torch's; only the tensor parallel ranks on one node exchange as such."""
    assert run(ranks, of_axes, 4) == [[(rank < 2, True), (False, True), (False, True)] for rank in range(4)]


def folded(rank: Rank) -> tuple[int, int]:
    """The place along `data` that a strategy sees, and the number of these."""
    made = Mesh(rank, context=2)
    made.connect()
    return made.of_state.data_rank, made.of_state.data_size


def test_a_strategy_splits_over_replicas_and_context(ranks: Any) -> None:
    """On dp 2 x context 2: four places."""
    assert run(ranks, folded, 4) == [(rank, 4) for rank in range(4)]


def straddling(rank: Rank, across: bool) -> str:
    """The error of a mesh whose second tensor group is on two nodes."""
    spec = mesh_job("ddp", 2, MODEL)
    spec = spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"tensor_across_nodes": across})})
    try:
        return str(Mesh.of(spec, replace(rank, node_ip="10.0.0.1" if rank.rank < 3 else "10.0.0.2")).note)
    except UserError as error:
        return error.message


def test_a_tensor_group_on_two_nodes_is_refused_unless_asked_for(ranks: Any) -> None:
    """On every rank, with the ranks and the nodes."""
    says = "parallel.tensor: 2: ranks 2 to 3 share layers, and are on nodes 10.0.0.1 and 10.0.0.2"
    assert run(ranks, straddling, 4, False) == [says] * 4
    assert run(ranks, straddling, 4, True) == ["mesh on 2 nodes: data and tensor between nodes"] * 4


@pytest.mark.parametrize(
    ("sizes", "nodes", "note"),
    [
        ({"tensor": 2}, "aabb", "mesh on 2 nodes: data between nodes; tensor within a node"),
        ({"pipeline": 2}, "aabb", "mesh on 2 nodes: pipeline between nodes; data within a node"),
        ({"pipeline": 2, "tensor": 2}, "aabbccdd", "mesh on 4 nodes: pipeline and data between nodes; tensor within a node"),
        ({"expert": 2}, "aabb", "mesh on 2 nodes: data between nodes; expert within a node"),
        ({"expert": 4}, "aabb", "mesh on 2 nodes: data and expert between nodes"),
        ({"tensor": 2}, "aaaa", None),
    ],
)  # fmt: skip
def test_which_axes_go_between_nodes(sizes: dict[str, int], nodes: str, note: str | None) -> None:
    """A run says it in a note."""
    assert mesh(0, len(nodes), **sizes).links(list(nodes)) == note


def test_a_world_size_that_holds_no_whole_number_of_replicas() -> None:
    """One clear error."""
    with pytest.raises(
        UserError, match=r"6 workers: one replica of the model takes 4 \(pipeline 2 x context 1 x tensor 2\)"
    ):
        mesh(0, 6, pipeline=2, tensor=2)
