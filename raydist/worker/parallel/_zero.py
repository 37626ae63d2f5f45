"""ZeRO-1 and ZeRO-2: every rank holds whole parameters, but only its own rows of the other state.

Runs in: each train worker. Torch, never ray.

    backward    a block's gradients are complete -> packed by rank -> reduce-scatter -> this rank's rows of their sum
    update      the optimizer has this rank's rows of each parameter: views of the parameter itself, no second copy
    forward     a block is next -> the rows of the other ranks, all-gathered while the blocks before it computed

FSDP2 with `reshard_after_forward=False` sends the same bytes, but holds the rows in addition to the whole parameters, and frees the
whole ones after each step (docs/adr/0005). torch's ZeroRedundancyOptimizer assigns whole parameters to ranks, broadcasts them one
by one after the update, and is no longer maintained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Rows

from raydist.spec import JobSpec
from raydist.worker.comm import gloo_p2p
from raydist.worker.comm.compression.piece import Piece
from raydist.worker.comm.compression.reducer import Reducer
from raydist.worker.comm.tree import Exchange, Fold, Node, Tree, in_place, room_for
from raydist.worker.mesh import Mesh
from raydist.worker.parallel import Example, ParamShard
from raydist.worker.parallel._model_graph import blocks_of, check_graph, refuse_scalars, tied_across, weakly
from raydist.worker.parts import Parts, WholeSums
from raydist.worker.precision import DTYPES

IN_FLIGHT = 2
"""Units that are sent at a time: one is sent while the next is computed."""


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
        self.own = [_rows(p.detach(), rank, world) for p in self.parameters]
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
        """[W, S] -> the parameters."""
        for p, rows in zip(self.parameters, self.split(packed), strict=True):
            whole = p.detach()
            if p.shape[0] % self.world == 0:
                whole.view(self.world, -1).copy_(rows)
                continue
            for part, row in zip(torch.split(whole.view(-1), rows.shape[1]), rows, strict=False):
                part.copy_(row[: part.numel()])


class _Slot:
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


class ZeroStrategy:
    """See `ParallelStrategy`. On one rank, the model as it is."""

    module: nn.Module
    takes_meta = False
    on_final: Callable[[Sequence[Tensor]], None] | None = None
    parts: Parts | None = None
    reduce_each: bool
    """Whether gradients are reduced to this rank's rows in every micro-batch (ZeRO-2), or stay whole until the last (ZeRO-1)."""

    def __init__(self, spec: JobSpec, mesh: Mesh) -> None:
        self._spec, self._mesh, self._rank = spec, mesh, mesh.rank
        self.loss_factor = 1.0
        self._reducer: Reducer | None = None

    def wrap(self, model: nn.Module, example: Example) -> nn.Module:
        """See `ParallelStrategy.wrap`. Runs `example` once, for the graph check."""
        refuse_scalars(model)
        model.to(self._rank.device)
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        check_graph(model, lambda: example(model), self._mesh)
        for name, b in model.named_buffers():
            b.copy_(buffers[name])
        self.module = model
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._units: list[Unit] = []
        self._last = self._ends = True
        # What is kept of a part until the next one: whole gradients, or this rank's rows (`_folds`).
        whole = self.parts is not None and not (self.reduce_each and self._mesh.data_size > 1)
        self._whole = WholeSums(self.parts, [*self._parameters.values()]) if whole and self.parts is not None else None
        self._folds: dict[int, Fold[Tensor]] = {}
        if self._mesh.data_size == 1:
            self._shards = {n: ParamShard(p) for n, p in self._parameters.items()}
        else:
            self._split(model)
        self.zero_grad()
        return model

    def _split(self, model: nn.Module) -> None:
        world, device = self._mesh.data_size, self._rank.device
        shared = tied_across(model)  # they are in the first unit, with the parameters outside of blocks
        names = {id(p): n for n, p in self._parameters.items()}
        modules: list[nn.Module] = [model]
        members: list[dict[str, nn.Parameter]] = [{}]
        for _, block in blocks_of(model):
            own = {names.pop(id(p)): p for p in block.parameters() if id(p) in names and id(p) not in shared}
            if own:
                modules.append(block)
                members.append(own)
        members[0] = {n: self._parameters[n] for n in names.values()}
        # In the order of the forward pass. The first unit has the parameters outside of blocks, and may be empty.
        for module, parameters in zip(modules, members, strict=True):
            if not parameters:
                continue
            unit = Unit(parameters, self._mesh.data_rank, world)
            module.register_forward_pre_hook(partial(self._before_forward, unit))
            for p in parameters.values():
                p.register_post_accumulate_grad_hook(weakly(self._has_gradient, len(self._units)))  # type: ignore[no-untyped-call]
            self._units.append(unit)
        mesh = self._mesh.data_mesh((world,), ("shard",))
        local = {n: own for unit in self._units for n, own in zip(unit.names, unit.own, strict=True)}
        self._shards = {
            n: ParamShard(
                nn.Parameter(local[n]),
                DTensor.from_local(local[n], mesh, [Rows(0)], run_check=False, shape=p.shape, stride=p.stride()),
            )
            for n, p in self._parameters.items()
        }
        largest = max((u.size for u in self._units), default=0)
        reduce = DTYPES[self._spec.precision.reduce]
        self._group = mesh.get_group()
        direct = gloo_p2p.direct(self._group)
        if self._spec.comm.compresses:
            self._reducer = Reducer(
                self._spec.comm, self._group, device, factor=self.loss_factor, aside=True, part=self._mesh.part
            )
            for unit in reversed(self._units):
                unit.piece = self._reducer.packed(
                    {n: p.shape for n, p in zip(unit.names, unit.parameters, strict=True)}
                )
            self._reducer.refuse()
        self._reducing = [_Slot(world, largest, reduce, device, direct) for _ in range(IN_FLIGHT)]
        # All-gathers happen in the forward pass, when no gradients are sent: both can use the same buffers.
        same = reduce is torch.float32
        self._gathering = (
            self._reducing if same else [_Slot(world, largest, torch.float32, device, False) for _ in range(IN_FLIGHT)]
        )
        if self.reduce_each:
            self._sums = {id(u): torch.zeros(u.size, device=device) for u in self._units}

    def shards(self) -> Mapping[str, ParamShard]:
        """See `ParallelStrategy.shards`: this rank's rows, in the memory of the whole parameters."""
        return self._shards

    def reduces_together(self) -> int:
        """See `ParallelStrategy`."""
        return self._mesh.data_size if self.reduce_each else 1

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """See `ParallelStrategy.accumulate`."""
        self._last = last
        self._ends = self.parts.ends if self.parts is not None else True
        with self._whole.micro_batch() if self._whole is not None else nullcontext():
            yield

    def messages(self) -> list[tuple[str, int, str]]:
        """For traces: the gradients of each unit in backward, then its rows in the next forward pass."""
        order = [(unit, _common(unit.names)) for unit in self._units]
        kind = "reduce_scatter" if self.parts is None else "all_to_all"
        out = [(kind, unit.world * unit.size, name) for unit, name in reversed(order)]
        return out + [("all_gather", unit.size, name) for unit, name in order]

    # --- backward: reduce-scatter gradients to this rank's rows of their sum

    def _has_gradient(self, number: int, parameter: Tensor) -> None:
        unit = self._units[number]
        unit.missing -= 1
        if unit.missing:
            return
        unit.missing = len(unit.parameters)
        if not (self._last or self.reduce_each) or not self._ends:
            return
        slot = self._reducing.pop(0)
        self._reducing.append(slot)
        self._take_sum(slot)
        grads = [_gradient(p) for p in unit.parameters]
        if self.parts is not None:
            nodes, own = self._nodes(self.parts, unit, grads)
            slot.reduce_tree(unit, self._group, self.parts.tree, nodes, own)
        else:
            packed, _ = slot.buffers(unit)
            unit.pack(grads, packed)
            slot.reduce(unit, self._group, self._reducer)
        if self.reduce_each:
            for p in unit.parameters:
                p.grad = None
        slot.last = self._last

    def _nodes(self, parts: Parts, unit: Unit, grads: list[Tensor]) -> tuple[list[list[Node]], Sequence[list[Tensor]]]:
        """The nodes that each rank sends of a unit, and the gradients of this rank's."""
        if self._whole is not None:
            return parts.nodes_of_copies(), self._whole.nodes_with(unit.parameters, grads)
        nodes = parts.nodes(range(unit.world), parts.round)
        return nodes, [grads] if nodes[self._mesh.data_rank] else []

    def _take_nodes(self, slot: _Slot, unit: Unit) -> Tensor | None:
        """Adds what has arrived to the parts before: this rank's rows of the sum once all parts have arrived."""
        assert self.parts is not None
        fold = self._folds.setdefault(id(unit), Fold(self.parts.tree, in_place))
        for node, rows in slot.take_nodes():
            kept = rows if slot.last or fold.joins(node) else rows.clone()  # the slot is used again
            fold.push(node, kept)
        if not slot.last:
            return None
        ((_, value),) = self._folds.pop(id(unit)).nodes
        return value

    def _take_sum(self, slot: _Slot) -> None:
        if slot.exchange is not None and slot.unit is not None:
            unit: Unit | None = slot.unit
            found = self._take_nodes(slot, slot.unit)
            if found is None:
                return
            shard = found
        else:
            unit = slot.wait()
            if unit is None:
                return
            _, shard = slot.buffers(unit)
        assert unit is not None
        if self.reduce_each:
            total = self._sums[id(unit)].add_(shard) if self.parts is None else self._sums[id(unit)].copy_(shard)
        for name, p, own, part in zip(
            unit.names, unit.parameters, unit.own, unit.split(total if self.reduce_each else shard), strict=True
        ):
            part = part[: own.numel()].view(own.shape)
            if not self.reduce_each:  # the sum replaces this rank's rows of the whole gradient
                part = _rows(_gradient(p), self._mesh.data_rank, unit.world).copy_(part)
            self._shards[name].local.grad = part
        if slot.last and self.on_final is not None:
            self.on_final([self._shards[name].local for name in unit.names])

    def finish_grads(self) -> None:
        """See `ParallelStrategy.finish_grads`: takes the last sums."""
        for slot in self._reducing if self._units else []:
            self._take_sum(slot)
        if self._reducer is not None:
            self._reducer.finish()
        if self._whole is not None and not self._units:
            self._whole.finish()

    def reducers(self) -> list[Reducer]:
        """See `ParallelStrategy`."""
        return [self._reducer] if self._reducer is not None else []

    def scale_grads(self, factor: float) -> None:
        """See `ParallelStrategy.scale_grads`."""
        if grads := self._grads():  # a stage may have no experts
            torch._foreach_mul_(grads, factor)

    def zero_grad(self) -> None:
        """See `ParallelStrategy.zero_grad`."""
        for slot in self._reducing if self._units else []:
            slot.wait()
        self._folds.clear()
        if self._whole is not None:
            self._whole.clear()
        for unit in self._units:
            unit.missing = len(unit.parameters)
            if self.reduce_each:
                self._sums[id(unit)].zero_()
        for name, p in self._parameters.items():
            p.grad = None
            self._shards[name].local.grad = None

    def _grads(self) -> list[Tensor]:
        return [s.local.grad for s in self._shards.values() if s.local.grad is not None]

    # --- forward: all-gather the rows that other ranks have updated

    def updated(self) -> None:
        """See `ParallelStrategy.updated`. Gathers the first units at once, the others during the forward pass."""
        for unit in self._units:
            unit.stale = True
        for unit in self._units[:IN_FLIGHT]:
            self._gather(unit)

    def _gather(self, unit: Unit) -> None:
        slot = self._gathering.pop(0)
        self._gathering.append(slot)
        _, shard = slot.buffers(unit)
        for own, part in zip(unit.own, unit.split(shard), strict=True):
            part[: own.numel()].copy_(own.reshape(-1))
        slot.gather(unit, self._group)

    def _before_forward(self, unit: Unit, module: nn.Module, args: object) -> None:
        if not unit.stale:
            return
        at = next(i for i, u in enumerate(self._units) if u is unit)
        for earlier in self._units[: at + 1]:  # also units that the forward pass has skipped
            if earlier.stale:
                self._arrive(earlier)

    @torch.no_grad()
    def _arrive(self, unit: Unit) -> None:
        slot = next(s for s in self._gathering if s.unit is unit)
        slot.wait()
        unit.unpack(slot.buffers(unit)[0])
        unit.stale = False
        following = [u for u in self._units if u.stale and not any(s.unit is u for s in self._gathering)]
        if following:
            self._gather(following[0])


def _rows(whole: Tensor, rank: int, world: int) -> Tensor:
    """The rows of `rank`: a view, which may have no rows."""
    each = -(-whole.shape[0] // world)
    first = min(rank * each, whole.shape[0])
    return whole[first : min(first + each, whole.shape[0])]


def _common(names: Sequence[str]) -> str:
    """A name for parameters that are sent together: the module that holds them all, if there is one."""
    parts = [name.split(".")[:-1] for name in names]
    same = [piece[0] for piece in zip(*parts, strict=False) if len(set(piece)) == 1]
    return ".".join(same) or f"{names[0]} and {len(names) - 1} more"


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "the graph check found a gradient for every parameter"
    return parameter.grad
