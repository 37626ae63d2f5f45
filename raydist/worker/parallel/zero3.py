"""ZeRO-3: parameters, gradients and optimizer state split over all ranks.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from raydist.worker.parallel._fsdp import FullyShardedStrategy


class Strategy(FullyShardedStrategy):
    """Each rank holds its rows of every parameter; on one rank, the model as it is."""

    def mesh(self) -> DeviceMesh:
        """One dimension: every rank."""
        return init_device_mesh(self._rank.device.type, (self._rank.world_size,), mesh_dim_names=("shard",))
