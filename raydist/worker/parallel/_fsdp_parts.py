"""Sums along the tree of `train.virtual_ranks` under FSDP2: in place of its reduce-scatter, and of its all-reduce between copies.

Runs in: each train worker. Torch, never ray. FSDP2 calls both in its own streams, or on CPU in the thread of the backward pass.

A sharded module reduces once in each turn of the ranks (raydist/worker/parts.py). This rank's rows of the parts before are kept
here, and FSDP2 gets zeros; in the last turn it gets the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from raydist.worker.comm import gloo_p2p
from raydist.worker.comm.tree import Exchange, Fold, Node, in_place, room_for
from raydist.worker.parallel._tree_all_reduce import TreeAllReduce
from raydist.worker.parts import Parts


class PartReduceScatter(gloo_p2p.DirectReduceScatter):
    """For `set_custom_reduce_scatter` of one module. `ranks`: of the data axis, that share a copy, in the order of the group.

    `rooms`: buffers that the modules of a model share, by device type.
    """

    def __init__(self, parts: Parts, ranks: Sequence[int], rooms: dict[str, Tensor]) -> None:
        super().__init__()
        self._parts, self._ranks, self._rooms = parts, ranks, rooms
        self.clear()

    def clear(self) -> None:
        """Forgets the parts before: the step begins, or begins again."""
        self.fold: Fold[Tensor] = Fold(self._parts.tree, in_place)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Returns once the result has arrived; on CUDA, in the stream."""
        if not self._parts.running:
            super().__call__(output_tensor, input_tensor, group, op, async_op)
            return
        nodes = self._parts.nodes(self._ranks, self._parts.round)
        sent = [input_tensor.view(-1)] if nodes[group.rank()] else []
        rows = output_tensor.numel()
        room = self._room(room_for(nodes, rows), output_tensor)
        sizes = [rows] * group.size()
        for node, value in Exchange(self._parts.tree, nodes, sent, sizes, room, group).wait():
            self.push(node, value)
        output_tensor.zero_()
        if self._parts.last and len(self.fold.nodes) == 1:
            output_tensor.copy_(self.fold.nodes[0][1])

    def push(self, node: Node, value: Tensor) -> None:
        """This rank's rows of a node; copied if they are kept."""
        self.fold.push(node, value if self.fold.joins(node) else value.clone())

    def _room(self, needed: int, like: Tensor) -> Tensor:
        room = self._rooms.get(like.device.type)
        if room is None or room.numel() < needed:
            room = self._rooms[like.device.type] = torch.empty(needed, dtype=like.dtype, device=like.device)
        return room[:needed]


class PartCopies:
    """For `set_all_reduce_hook` of the same module: the sum over the copies of the state, in the last turn."""

    def __init__(
        self, parts: Parts, scatter: PartReduceScatter, between: TreeAllReduce, group: dist.ProcessGroup
    ) -> None:
        self._parts, self._scatter, self._between, self._group = parts, scatter, between, group

    def __call__(self, reduced: Tensor) -> None:
        """`reduced`: the rows of the part that this copy has computed, if a copy is one rank."""
        if not self._parts.running:
            dist.all_reduce(reduced, group=self._group)
            return
        if self._parts.together == 1 and self._parts.term is not None:
            self._scatter.push((self._parts.term, self._parts.term + 1), reduced)
        reduced.zero_()
        if self._parts.last:
            found = [value for _, value in self._scatter.fold.nodes]
            self._between(found).wait()
            reduced.copy_(found[-1])
