"""Hybrid sharding: ZeRO-3 within groups of `parallel.shard` ranks, one copy of the state per group.

Runs in: each train worker. Torch, never ray.

Parameters are gathered over the fast links within a group (a node, by default); only gradients cross between groups.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from raydist.errors import UserError
from raydist.extension_plans import StrategyPlan
from raydist.spec import JobSpec
from raydist.spec.parts import near_divisors, problem
from raydist.worker.parallel._fsdp import FullyShardedStrategy

PLAN = StrategyPlan(
    sharded=("optimizer", "gradients", "parameters"),
    group=lambda spec, ranks, per_node: spec.parallel.shard or min(per_node, ranks),
    compresses=True,
    parts=True,
    local_steps=True,
    experts="zero3",
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
        if self._mesh.copies > 1:  # the other copies train apart
            return self._mesh.data_mesh((shard,), ("shard",))
        return self._mesh.data_mesh((world // shard, shard), ("replicate", "shard"))

    def ranks_per_copy(self) -> int:
        """Raises UserError if the group size does not divide the number of ranks."""
        if self._shard is not None:
            return self._shard
        world = self._mesh.data_size
        shard = self._spec.parallel.shard or self._mesh.within_nodes()
        if world % shard:
            raise UserError(
                f"parallel.shard: {shard} does not divide the {world} replicas of the model",
                "set it to a divisor, such as the GPUs of a node",
            )
        self._shard = shard
        return shard
