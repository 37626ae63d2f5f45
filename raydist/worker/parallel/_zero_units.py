"""Parameters that ZeRO-1 and ZeRO-2 send together, packed by rank, and the buffers for sending them.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raydist.worker.comm import gloo_p2p
from raydist.worker.comm.compression.piece import Piece
from raydist.worker.comm.compression.reducer import Reducer
from raydist.worker.comm.tree import Exchange, Node, Tree, room_for


class Unit:
    """Parameters that are sent together: the parameters of a block, or all outside of blocks.

    Packed, they are [W, S]: one row for each of the W ranks, with its rows of every parameter. `size` is S.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], rank: int, world: int) -> None:
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.world = world
        # Split like torch.chunk: the last ranks may get fewer rows, or none.
        self.parts = [-(-p.shape[0] // world) * (p.numel() // max(p.shape[0], 1)) for p in self.parameters]
        self.size = sum(self.parts)
        self.own = [rows_of(p.detach(), rank, world) for p in self.parameters]
        self.missing = len(self.parameters)
        """Gradients that this backward pass has not computed yet."""
        self.stale = False
        """Whether other ranks hold newer values of their rows."""
        self.piece: Piece | None = None
        """If gradients are compressed."""

    def split(self, packed: Tensor) -> Iterator[Tensor]:
        """[..., S] -> a view of it for each parameter."""
        return iter(torch.split(packed, self.parts, dim=-1))

    def pack(self, wholes: list[Tensor], into: Tensor) -> None:
        """Whole tensors -> [W, S]. The padding of a rank with fewer rows is left as it is."""
        for whole, rows in zip(wholes, self.split(into), strict=True):
            if whole.shape[0] % self.world == 0:
                rows.copy_(whole.view(self.world, -1))
                continue
            for part, row in zip(torch.split(whole.view(-1), rows.shape[1]), rows, strict=False):
                row[: part.numel()].copy_(part)

    def unpack(self, packed: Tensor) -> None:
        """[W, S] -> the parameters. This rank's rows keep their values, and so their version, by which an offloaded optimizer knows
        that its copy of them is right."""
        for p, rows in zip(self.parameters, self.split(packed), strict=True):
            whole = p.data
            if p.shape[0] % self.world == 0:
                whole.view(self.world, -1).copy_(rows)
                continue
            for part, row in zip(torch.split(whole.view(-1), rows.shape[1]), rows, strict=False):
                part.copy_(row[: part.numel()])


class Slot:
    """Buffers for sending one unit, reused for the next: the packed unit, this rank's part, and, if `parts`, a receive buffer for a
    direct reduce-scatter.
    """

    def __init__(self, world: int, size: int, dtype: torch.dtype, device: torch.device, parts: bool) -> None:
        # Zeros, because the padding of short rows is sent, too.
        self._all = torch.zeros(world * size, dtype=dtype, device=device)
        self._shard = torch.zeros(size, dtype=dtype, device=device)
        self._parts = torch.empty_like(self._all) if parts else None
        self.unit: Unit | None = None
        self.work: gloo_p2p.Work | None = None
        self.exchange: Exchange | None = None
        """If gradients are summed along a tree."""
        self.last = False
        """Whether the unit is from the last micro-batch of a step."""

    def buffers(self, unit: Unit) -> tuple[Tensor, Tensor]:
        """(packed unit, [W, S]; this rank's part, [S])."""
        return self._all[: unit.world * unit.size].view(unit.world, unit.size), self._shard[: unit.size]

    def reduce(self, unit: Unit, group: dist.ProcessGroup, reducer: Reducer | None) -> None:
        """Starts a reduce-scatter of the packed gradients into this rank's part."""
        packed, shard = self.buffers(unit)
        if reducer is not None and reducer.active:
            assert unit.piece is not None
            self.unit, self.work = unit, reducer.reduce_scatter(unit.piece, packed, shard)
            return
        parts = self._parts[: packed.numel()] if self._parts is not None else None
        self.unit, self.work = unit, gloo_p2p.reduce_scatter(shard, packed.view(-1), parts, group)

    def reduce_tree(
        self,
        unit: Unit,
        group: dist.ProcessGroup,
        tree: Tree,
        nodes: Sequence[Sequence[Node]],
        own: Sequence[list[Tensor]],
    ) -> None:
        """The same along a tree. `own`: of each of this rank's nodes the unit's gradients."""
        packed, _ = self.buffers(unit)
        sent = [packed, *(torch.zeros_like(packed) for _ in own[1:])][: len(own)]
        for into, grads in zip(sent, own, strict=True):
            unit.pack(grads, into)
        needed = room_for(nodes, unit.size)
        if self._parts is None or self._parts.numel() < needed:
            self._parts = torch.empty(needed, dtype=packed.dtype, device=packed.device)
        flat = [node.view(-1) for node in sent]
        self.unit = unit
        self.exchange = Exchange(tree, nodes, flat, [unit.size] * unit.world, self._parts[:needed], group)

    def gather(self, unit: Unit, group: dist.ProcessGroup) -> None:
        """Starts an all-gather of this rank's part into the packed buffer."""
        packed, shard = self.buffers(unit)
        self.unit, self.work = unit, gloo_p2p.all_gather(packed.view(-1), shard, group)

    def wait(self) -> Unit | None:
        """Waits, and returns the unit whose values have arrived; None if nothing was sent."""
        unit, work = self.unit, self.work or self.exchange
        if work is not None:
            work.wait()
        self.unit = self.work = self.exchange = None
        return unit

    def take_nodes(self) -> list[tuple[Node, Tensor]]:
        """Waits for an exchange along a tree: this rank's part of each node, valid until the slot is used again."""
        assert self.exchange is not None
        nodes = self.exchange.wait()
        self.unit = self.exchange = None
        return nodes


def rows_of(whole: Tensor, rank: int, world: int) -> Tensor:
    """The rows of `rank`: a view, which may have no rows."""
    each = -(-whole.shape[0] // world)
    first = min(rank * each, whole.shape[0])
    return whole[first : min(first + each, whole.shape[0])]
