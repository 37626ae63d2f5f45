"""Hybrid sharding: ZeRO-3 within groups of `parallel.shard` ranks, copies of that across the groups.

Runs in: each train worker. Torch, never ray.

Parameters are gathered over the fast links within a group (a node, by default); only gradients cross between groups.
"""

from __future__ import annotations

import math
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from raydist.errors import UserError
from raydist.worker.parallel._fsdp import FullyShardedStrategy


class Strategy(FullyShardedStrategy):
    """Ranks r, r + 1, ... of one group of `parallel.shard` hold one copy; on one rank, the model as it is."""

    def mesh(self) -> DeviceMesh:
        """(copies, ranks of a copy). Raises UserError if the ranks do not make whole groups."""
        world = self._rank.world_size
        shard = self._spec.parallel.shard or self._shard_of_nodes()
        if world % shard:
            raise UserError(
                f"parallel.shard: {shard} does not divide the {world} workers",
                "set it to a divisor, such as the GPUs of a node",
            )
        names = ("replicate", "shard")
        return init_device_mesh(self._rank.device.type, (world // shard, shard), mesh_dim_names=names)

    def _shard_of_nodes(self) -> int:
        """The largest group that lies within a node on every node: the greatest common divisor of the nodes' ranks.

        All ranks agree on it. Their own node's ranks may differ, and ranks that built different meshes would wait for each other.
        """
        world = self._rank.world_size
        mine = torch.tensor([int(os.environ.get("LOCAL_WORLD_SIZE", world))])
        sizes = torch.empty(world, dtype=mine.dtype)
        dist.all_gather_into_tensor(sizes, mine, group=self._rank.control)
        return math.gcd(*sizes.tolist())
