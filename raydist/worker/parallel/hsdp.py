"""Hybrid sharding: ZeRO-3 within groups of `parallel.shard` ranks, one copy of the state per group.

Runs in: each train worker. Torch, never ray.

Parameters are gathered over the fast links within a group (a node, by default); only gradients cross between groups.
"""

from __future__ import annotations

import math
import os

import torch
from torch.distributed.device_mesh import DeviceMesh

from raydist.errors import UserError
from raydist.extension_plans import StrategyPlan
from raydist.spec import JobSpec
from raydist.spec.parts import near_divisors, problem
from raydist.worker.comm import collectives
from raydist.worker.parallel._fsdp import FullyShardedStrategy

PLAN = StrategyPlan(
    sharded=("optimizer", "gradients", "parameters"),
    group=lambda spec, ranks, per_node: spec.parallel.shard or min(per_node, ranks),
    compresses=True,
    parts=True,
)

VARIANTS = {"in pairs": {"shard": 2}}
"""Fields of `parallel` with which tests/contracts trains too."""


def check_spec(spec: JobSpec) -> None:
    """Raises SpecValueError if `parallel.shard` does not divide the number of workers."""
    shard, workers, replica = spec.parallel.shard, spec.cluster.workers, spec.parallel.replica
    if shard is not None and spec.cluster.least < spec.cluster.most:
        raise problem("cluster.workers", workers, f"may be a number that {shard} does not divide",
                      "set a fixed number of workers, or leave out parallel.shard")  # fmt: skip
    if shard is not None and spec.cluster.most // replica % shard:
        what = "workers" if replica == 1 else f"workers / {replica} of a replica"
        raise problem("parallel.shard", shard, f"does not divide the {workers} {what}",
                      near_divisors(spec.cluster.most // replica, shard))  # fmt: skip


class Strategy(FullyShardedStrategy):
    """`parallel.shard` consecutive ranks hold one copy together. On one rank, the model is not wrapped."""

    _shard: int | None = None

    def devices(self) -> DeviceMesh:
        """(copies, ranks per copy). Raises UserError: see `ranks_per_copy`."""
        world, shard = self._mesh.data_size, self.ranks_per_copy()
        return self._mesh.data_mesh((world // shard, shard), ("replicate", "shard"))

    def ranks_per_copy(self) -> int:
        """Raises UserError if the group size does not divide the number of ranks."""
        if self._shard is not None:
            return self._shard
        world = self._mesh.data_size
        shard = self._spec.parallel.shard or self._shard_of_nodes()
        if world % shard:
            raise UserError(
                f"parallel.shard: {shard} does not divide the {world} replicas of the model",
                "set it to a divisor, such as the GPUs of a node",
            )
        self._shard = shard
        return shard

    def _shard_of_nodes(self) -> int:
        """The largest group size with no group across nodes: the greatest common divisor of the numbers of replicas per node.

        All ranks get the same number. Nodes may differ in size, and ranks that built different meshes would wait for each other.
        """
        world = self._rank.world_size
        local = torch.tensor([int(os.environ.get("LOCAL_WORLD_SIZE", world))])
        sizes = torch.empty(world, dtype=local.dtype)
        collectives.all_gather(sizes, local, group=self._rank.control)
        shared = math.gcd(*sizes.tolist()) // (self._mesh.tensor * self._mesh.context)  # stages are on ranks far apart
        return math.gcd(
            max(shared, 1), self._mesh.data_size
        )  # with one replica on several nodes there are no groups within one
