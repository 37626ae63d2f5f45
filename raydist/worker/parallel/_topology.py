"""The ways in which ddp sums a bucket: `comm.topology`.

Runs in: each train worker. Torch, never ray.

    torch      torch's all-reduce: a ring on gloo, what NCCL chooses on CUDA
    direct     each rank adds up its part, which it receives from all, and all gather the parts
    two_level  the same within a node; between, an all-reduce of each part by the ranks that have it on their nodes:

               node A   ranks 0 1      0 adds up half 1, 1 half 2, each of two ranks
               node B   ranks 2 3      0 and 2 all-reduce half 1, 1 and 3 half 2; then halves are gathered on each node

    ring       torch's, of a group whose ranks have another order
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from raydist.spec import CommSpec
from raydist.worker.comm.groups import another
from raydist.worker.comm.tree import Node, Tree
from raydist.worker.parallel._tree_all_reduce import TreeAllReduce


def teams(ranks: Sequence[int], nodes: Sequence[str]) -> list[list[int]]:
    """`ranks` in teams of equal size on one node each, as large as possible. `nodes`: of all ranks of the world."""
    on: dict[str, list[int]] = {}
    for rank in ranks:
        on.setdefault(nodes[rank], []).append(rank)
    size = math.gcd(*map(len, on.values()))
    return [own[i : i + size] for own in on.values() for i in range(0, len(own), size)]


def two_levels(made: Sequence[Sequence[int]]) -> bool:
    """Whether there is something to sum within these teams, and between them."""
    return len(made) > 1 and len(made[0]) > 1


def ring_of(comm: CommSpec, group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The ranks of `group` in the order of `comm.ring`; `group` itself where there is none. A collective of the group."""
    if comm.topology != "ring" or comm.ring is None:
        return group
    own = set(dist.get_process_group_ranks(group))
    order = [rank for rank in comm.ring if rank in own]
    return another(order, ordered=True)


def all_reduce_of(
    comm: CommSpec,
    group: dist.ProcessGroup,
    nodes: Sequence[str],
    me: int,
    device: torch.device,
    shared: bool = False,
) -> TreeAllReduce | None:
    """The sum over `group` by `comm.topology`; None: torch's. `me`: this rank. `shared`: others send over `group` at the same time.
    A collective of the group."""
    ranks = dist.get_process_group_ranks(group)
    if comm.topology == "direct":
        return TreeAllReduce(Tree(len(ranks)), _one_each(len(ranks)), group, device, shared=shared)
    if comm.topology != "two_level" or not two_levels(found := teams(ranks, nodes)):
        return None
    own = next(team for team in found if me in team)
    place = own.index(me)
    within = another(own, alone=True)
    across = another([team[place] for team in found], alone=True)
    return TreeAllReduce(Tree(len(own)), _one_each(len(own)), within, device, across=across)


def _one_each(count: int) -> list[list[Node]]:
    return [[(i, i + 1)] for i in range(count)]
