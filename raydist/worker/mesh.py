"""The coordinates of a rank: which part of the model it has, and which part of the global batch it reads.

Runs in: each train worker. Torch, never ray. It sends nothing: all ranks compute the same from the sizes.

    ranks are numbered by (pipeline, data, context, tensor), tensor innermost:   4 ranks, tensor 2   0 1 | 2 3
                                                                                 data coordinate    0 0 | 1 1

Ranks that differ only in `tensor`, `context` or `pipeline` together hold one replica of the model and read the same samples.
Code that divides samples among ranks, or draws random numbers for them, uses `data_rank` and `data_size`, never the world's.
Today every strategy shards along `data` alone, so the other sizes are 1 and the data coordinate is the rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from raydist.errors import UserError
from raydist.worker.distributed import Rank


@dataclass(frozen=True, slots=True)
class Mesh:
    """All ranks as an array of shape (pipeline, data, context, tensor), and the place of `rank` in it.

    Raises UserError if a replica's ranks do not divide the world size.
    """

    rank: Rank
    pipeline: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        if self.rank.world_size % self.replica_size:
            raise UserError(
                f"{self.rank.world_size} workers: one replica of the model takes {self.replica_size} (pipeline {self.pipeline} x "
                f"context {self.context} x tensor {self.tensor}), which does not divide them",
                f"set cluster.workers to a multiple of {self.replica_size}",
            )

    @property
    def replica_size(self) -> int:
        """Ranks that together hold one replica of the model."""
        return self.pipeline * self.context * self.tensor

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis, in the order of the mesh."""
        return {"pipeline": self.pipeline, "data": self.data_size, "context": self.context, "tensor": self.tensor}

    @property
    def data_size(self) -> int:
        """Replicas of the model: the parts into which a global batch is divided."""
        return self.rank.world_size // self.replica_size

    @property
    def data_rank(self) -> int:
        """Which of these parts this rank reads."""
        return self.coordinate(self.rank.rank)[1]

    @property
    def counts(self) -> bool:
        """Whether this rank adds its loss and tokens to the step's sums: of the ranks that compute the same loss, one does."""
        pipeline, _, _, tensor = self.coordinate(self.rank.rank)
        return tensor == 0 and pipeline == self.pipeline - 1

    @property
    def stream(self) -> tuple[int, ...]:
        """Seeds this rank's random numbers (dropout), beside the run's seed. Equal on the ranks of one stage of a replica."""
        pipeline, data, _, _ = self.coordinate(self.rank.rank)
        return (data,) if self.pipeline == 1 else (data, pipeline)

    def coordinate(self, rank: int) -> tuple[int, int, int, int]:
        """Of world rank `rank`: its index along (pipeline, data, context, tensor)."""
        rank, tensor = divmod(rank, self.tensor)
        rank, context = divmod(rank, self.context)
        pipeline, data = divmod(rank, self.data_size)
        return pipeline, data, context, tensor
