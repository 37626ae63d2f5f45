"""Ranks of which this process is the first, and which send nothing: to split layers and experts as a real rank does.

Runs in: the user's shell (`raydist plan`). Torch, never ray.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from raydist.worker.distributed import Rank
from raydist.worker.exchange.all_to_all import AllToAll
from raydist.worker.mesh import Mesh


@contextmanager
def first_of(tensor: int, expert: int = 1, context: int = 1) -> Iterator[Mesh]:
    """The mesh of rank 0, which has the most of a dimension that its tensor group does not divide; as few ranks as make it.

    torch's own fake process group is the default one within the block, and destroyed after it. Raises ValueError if the process has
    another, which stays as it is.
    """
    # Imported here, because it registers a backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ranks = math.lcm(tensor * context, expert)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        rank = Rank(0, ranks, 0, torch.device("cpu"), "fake", "127.0.0.1", None, ())
        mesh = Mesh(rank, context=context, tensor=tensor, expert=expert)
        mesh.connect()
        yield mesh
    finally:
        dist.destroy_process_group()


class OneGroup:
    """The mesh of `first_of`, for one measurement; or between `keep` and `close` until one of another size is asked for: what was
    built in it can be used again."""

    def __init__(self) -> None:
        self._keep = False
        self._size: tuple[int, ...] | None = None
        self._mesh: Mesh | None = None
        self._open = ExitStack()

    def keep(self) -> None:
        """From now on."""
        self._keep = True

    def close(self) -> None:
        """Destroys it, and what was built in it."""
        self._keep, self._size = False, None
        self._open.close()

    @contextmanager
    def of(self, tensor: int, expert: int, context: int, built: dict[bool, Any]) -> Iterator[Mesh]:
        """The mesh of these sizes. `built`: is emptied when it is destroyed."""
        if self._size != (tensor, expert, context):
            keep = self._keep
            self.close()
            self._keep = keep
            self._mesh = self._open.enter_context(first_of(tensor, expert, context))
            self._size = tensor, expert, context
        assert self._mesh is not None
        self._open.callback(built.clear)
        try:
            yield self._mesh
        finally:
            if not self._keep:
                self.close()


class EvenExchange(AllToAll):
    """The exchange of tokens of which every rank sends the same number to every other: sizes without values."""

    def sizes(self, rows_RD: Tensor, counts_E: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """See `AllToAll.sizes`."""
        each = [len(rows_RD) // self._ranks] * self._ranks
        each[0] += len(rows_RD) - sum(each)
        return counts_E, each, each
