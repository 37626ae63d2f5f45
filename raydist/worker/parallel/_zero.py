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
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Rows

from raydist.spec import JobSpec
from raydist.worker.comm import gloo_p2p
from raydist.worker.comm.compression.reducer import Reducer
from raydist.worker.comm.tree import Fold, Node, in_place
from raydist.worker.mesh import Mesh
from raydist.worker.parallel import Example, ParamShard, WithoutExample
from raydist.worker.parallel._model_graph import blocks_of, check_graph, refuse_scalars, tied_across, weakly
from raydist.worker.parallel._zero_units import Slot, Unit, rows_of
from raydist.worker.parts import Parts, WholeSums
from raydist.worker.precision import DTYPES

IN_FLIGHT = 2
"""Units that are sent at a time: one is sent while the next is computed."""


class ZeroStrategy(WithoutExample):
    """See `ParallelStrategy`. On one rank, the model as it is."""

    module: nn.Module
    takes_meta = False
    on_final: Callable[[Sequence[Tensor]], None] | None = None
    reduce_each: bool
    """Whether gradients are reduced to this rank's rows in every micro-batch (ZeRO-2), or stay whole until the last (ZeRO-1)."""

    def __init__(self, spec: JobSpec, mesh: Mesh) -> None:
        self._spec, self._mesh, self._rank = spec, mesh, mesh.rank
        self.loss_factor = 1.0
        self._reducer: Reducer | None = None

    def wrap(self, model: nn.Module, example: Example | None) -> nn.Module:
        """See `ParallelStrategy.wrap`. Runs `example`, if there is one, once, for the graph check."""
        refuse_scalars(model)
        model.to(self._rank.device)
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        if example is not None:
            check_graph(model, partial(example, model), self._mesh)
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
        self._reducing = [Slot(world, largest, reduce, device, direct) for _ in range(IN_FLIGHT)]
        # All-gathers happen in the forward pass, when no gradients are sent: both can use the same buffers.
        same = reduce is torch.float32
        self._gathering = (
            self._reducing if same else [Slot(world, largest, torch.float32, device, False) for _ in range(IN_FLIGHT)]
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

    def _take_nodes(self, slot: Slot, unit: Unit) -> Tensor | None:
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

    def _take_sum(self, slot: Slot) -> None:
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
                part = rows_of(_gradient(p), self._mesh.data_rank, unit.world).copy_(part)
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
        for slot in self._gathering if self._units else []:
            slot.wait()  # a gather that began before these weights did, and that no forward pass has taken
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
        self._arrive_all(self._units[: at + 1])  # also units that the forward pass has skipped

    def gather(self) -> None:
        """See `WithoutExample.gather`."""
        self._arrive_all(self._units)

    def _arrive_all(self, units: Sequence[Unit]) -> None:
        for unit in units:
            if unit.stale:
                self._arrive(unit)

    @torch.no_grad()
    def _arrive(self, unit: Unit) -> None:
        slot = next(s for s in self._gathering if s.unit is unit)
        slot.wait()
        unit.unpack(slot.buffers(unit)[0])
        unit.stale = False
        following = [u for u in self._units if u.stale and not any(s.unit is u for s in self._gathering)]
        if following:
            self._gather(following[0])


def _common(names: Sequence[str]) -> str:
    """A name for parameters that are sent together: the module that holds them all, if there is one."""
    parts = [name.split(".")[:-1] for name in names]
    same = [piece[0] for piece in zip(*parts, strict=False) if len(set(piece)) == 1]
    return ".".join(same) or f"{names[0]} and {len(names) - 1} more"


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "the graph check found a gradient for every parameter"
    return parameter.grad
