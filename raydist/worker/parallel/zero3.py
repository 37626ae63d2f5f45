"""ZeRO-3: parameters, gradients and optimizer state split over all ranks.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from raydist.extension_plans import StrategyPlan
from raydist.worker.parallel._fsdp import FullyShardedStrategy

PLAN = StrategyPlan(sharded=("optimizer", "gradients", "parameters"), compresses=True, parts=True, without_example=True)
VARIANTS = {
    "keeping all": {"reshard_after_forward": False},
    "dropping all, no prefetch": {"reshard_after_forward": True, "prefetch": 0},
}
"""Fields of `parallel` with which tests/contracts trains too."""


class Strategy(FullyShardedStrategy):
    """Each rank holds its rows of every parameter. On one rank, the model is not wrapped."""

    def ranks_per_copy(self) -> int:
        """All of them."""
        return self._mesh.data_size

    def devices(self) -> DeviceMesh:
        """One dimension with all of them."""
        return self._mesh.data_mesh((self._mesh.data_size,), ("shard",))
