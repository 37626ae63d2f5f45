"""A tensor group of which this process is the first rank, and which sends nothing: to split a model as a real rank does.

Runs in: the user's shell (`raydist plan`). Torch, never ray.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from raydist.worker.distributed import Rank
from raydist.worker.mesh import Mesh


@contextmanager
def first_of(ranks: int) -> Iterator[Mesh]:
    """The mesh of rank 0 of a tensor group, which has the most of a dimension that `ranks` do not divide.

    torch's own fake process group is the default one within the block, and destroyed after it. Raises ValueError if the process has
    another, which stays as it is.
    """
    # Imported here, because it registers a backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        mesh = Mesh(Rank(0, ranks, 0, torch.device("cpu"), "fake", "127.0.0.1", None, ()), tensor=ranks)
        mesh.connect()
        yield mesh
    finally:
        dist.destroy_process_group()
