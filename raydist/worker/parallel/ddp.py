"""Replicas of the model on all ranks, gradients summed by torch's DistributedDataParallel.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raydist.extension_plans import StrategyPlan
from raydist.spec import JobSpec
from raydist.worker.comm.compression.piece import Piece
from raydist.worker.comm.compression.reducer import Reducer
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.mesh import Mesh
from raydist.worker.model._moe import layers_of
from raydist.worker.parallel import Example, ParamShard, WithoutExample
from raydist.worker.parallel._model_graph import check_graph, plain_name
from raydist.worker.parallel._topology import all_reduce_of, ring_of
from raydist.worker.parallel._tree_all_reduce import TreeAllReduce
from raydist.worker.parts import WholeSums
from raydist.worker.precision import DTYPES

PLAN = StrategyPlan(bucketed=True, compresses=True, parts=True, local_steps=True, without_example=True)

# Renamed in torch 2.13.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class Strategy(WithoutExample):
    """DDP. On one rank, the model is not wrapped. With `comm.topology: two_level` the constructor is a collective."""

    module: nn.Module
    takes_meta = False
    on_final: Callable[[Sequence[torch.Tensor]], None] | None = None

    def __init__(self, spec: JobSpec, mesh: Mesh) -> None:
        self._spec, self._mesh, self._rank = spec, mesh, mesh.rank
        # DDP's all-reduce averages; a sum along a tree does not.
        self.loss_factor = float(mesh.data_size) if spec.train.virtual_ranks is None else 1.0
        # Whether passes call the model itself: in a pipeline in another order than DDP's, with expert parallel under two of them.
        self._direct = spec.parallel.pipeline > 1 or spec.parallel.expert > 1
        self._ddp: DistributedDataParallel | None = None
        self._reducer: Reducer | None = None
        self._pieces: list[Piece] = []
        self._tree: TreeAllReduce | None = None
        """Of `train.virtual_ranks`, or of `comm.topology`; None: torch's all-reduce over `_group`."""
        self._group: dist.ProcessGroup | None = None
        two_level = spec.comm.topology == "two_level"
        self._nodes = gather_json(self._rank.node_ip, self._rank.control) if two_level else []
        self._seen: list[list[torch.Tensor]] = []
        """The parameters of each bucket, in the order of the last backward pass."""

    def wrap(self, model: nn.Module, example: Example | None) -> nn.Module:
        """See `ParallelStrategy.wrap`. Runs `example`, if there is one, for the graph check."""
        self._direct = self._direct or example is None
        model.to(self._rank.device)
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        # From the last parameter to the first, as most backward passes reach them.
        order = [*self._parameters.values()][::-1]
        if example is not None:
            named = {plain_name(n): p for n, p in self._parameters.items()}
            order = [named[n] for n in check_graph(model, partial(example, model), self._mesh)]
        self._sums = WholeSums(self.parts, [*self._parameters.values()]) if self.parts is not None else None
        self.zero_grad()
        self.module = model
        if self._mesh.data_size > 1 and self._parameters:
            # Of running statistics all ranks take the first one's before a forward pass. Buffers that are not persistent (rotary
            # tables) are the same on all ranks, and so are the biases of routers, which all ranks move alike.
            sent = buffers.keys() & model.state_dict().keys() - {f"{n}.router.bias" for n, _ in layers_of(model)}
            ignored = buffers.keys() - sent
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)  # type: ignore[no-untyped-call]
            sync_buffers: dict[str, Any] = {_SYNC_BUFFERS: bool(sent)}
            bucket_mb = self._spec.parallel.bucket_mb  # raydist's loop has replaced `auto` with a number
            ddp = DistributedDataParallel(
                model,
                device_ids=[self._rank.device.index] if self._rank.device.type == "cuda" else None,
                process_group=self._mesh.group("data"),
                **sync_buffers,
                gradient_as_bucket_view=True,
                bucket_cap_mb=None if bucket_mb == "auto" else bucket_mb,
            )
            group = self._mesh.group("data")
            assert group is not None
            self._group = ring_of(self._spec.comm, group)
            if self._spec.comm.compresses:
                self._reducer = Reducer(
                    self._spec.comm, group, self._rank.device, factor=self.loss_factor, aside=True, part=self._mesh.part
                )
            if self.parts is not None:
                nodes = self.parts.nodes_of_copies()
                # The stages of a rank sum over the same ranks, each in a thread of its own.
                self._tree = TreeAllReduce(self.parts.tree, nodes, group, self._rank.device, shared=self._direct)
            else:
                self._tree = all_reduce_of(
                    self._spec.comm, group, self._nodes, self._rank.rank, self._rank.device, shared=self._direct
                )
            own_sums = self._spec.comm.compresses or self._tree is not None or self._group is not group
            if own_sums or self._spec.precision.reduce != "fp32" or self._spec.offload.optimizer == "cpu":
                # Through a lambda, because torch compares annotations, and those of this module are strings. Torch holds it where
                # the garbage collector does not see it: a strong reference would leak the model, its groups and their threads.
                weak = weakref.proxy(self)
                ddp.register_comm_hook(None, lambda _, bucket: weak._sum(bucket))
            self._settle_buckets(ddp, order)
            self.module = self._ddp = ddp
        for name, b in model.named_buffers():
            b.copy_(buffers[name])
        self.zero_grad()
        return self.module

    def _settle_buckets(self, ddp: DistributedDataParallel, order: Sequence[torch.Tensor]) -> None:
        # DDP rebuilds its buckets after the first backward. The sum over three or more ranks depends on the position of a
        # gradient in its bucket, so the first step of a resumed run would differ in the last bits from the same step of an
        # uninterrupted run. A backward pass of zeros, in the order of the check's, rebuilds the buckets before the first step.
        _reach(order, ddp)
        ddp.reducer._rebuild_buckets()
        if self._reducer is not None:
            self._seen.clear()
            _reach(order, ddp)  # once more, with the buckets of the steps
            names = {id(p): n for n, p in self._parameters.items()}
            for bucket in self._seen:
                self._pieces.append(self._reducer.flat({names[id(p)]: p.shape for p in bucket}))
            self._reducer.refuse()

    def _sum(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """DDP's communication hook, for a sum in fewer bits, and to report that a bucket is reduced. In fp32 the result is bit for
        bit that of DDP without a hook. A compressed bucket is not reported.

        torch's own compression hook refuses gloo, although gloo supports it. The division comes before the cast, as in torch's
        hook, so that fp16 does not overflow in the sum.
        """
        grads, parameters, dtype = bucket.buffer(), bucket.parameters(), DTYPES[self._spec.precision.reduce]
        # A thread of gloo that dropped the last reference to its group would wait for itself.
        weak = weakref.proxy(self)
        if self._reducer is not None and self._reducer.active:
            return self._reducer.all_reduce(self._pieces[bucket.index()], grads)
        if self._tree is not None and self._sums is not None and self.parts is not None and self.parts.running:
            found = self._sums.nodes_with(parameters, bucket.gradients())
            whole = [torch.cat([grad.reshape(-1) for grad in node]) for node in found[:-1]]
            return self._tree([*whole, grads], lambda: weak._is_final(parameters))
        self._seen.append(parameters)
        grads.mul_(1 / self._mesh.data_size)
        sent = grads.to(dtype)

        def reduced(done: torch.futures.Future[Any]) -> torch.Tensor:
            done.value()  # raises what the sum has raised
            if sent is not grads:
                grads.copy_(sent)
            weak._is_final(parameters)
            return grads

        if self._tree is not None and self.parts is None:
            return self._tree([sent]).then(reduced)
        work = dist.all_reduce(sent, group=self._group, async_op=True)
        assert work is not None
        return work.get_future().then(reduced)

    def _is_final(self, parameters: Sequence[torch.Tensor]) -> None:
        if self.on_final is not None:
            self.on_final(parameters)

    @property
    def room(self) -> int | None:
        """Bytes of the buffer for what arrives of a sum along the tree; None where there is none."""
        return self._tree.room if self._tree is not None else None

    def reduces_together(self) -> int:
        """See `ParallelStrategy`: each rank has whole gradients."""
        return 1

    def shards(self) -> Mapping[str, ParamShard]:
        """See `ParallelStrategy.shards`: every parameter, whole."""
        return {n: ParamShard(p) for n, p in self._parameters.items()}

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """See `ParallelStrategy.accumulate`: gradients are summed over the ranks in the last micro-batch only.

        Where forward passes do not go through DDP, its reducer waits for gradients only from here on, as in
        torch.distributed.pipelining.
        """
        if self._sums is not None:
            return self._part(last)
        return self._passes(last)

    @contextmanager
    def _part(self, last: bool) -> Iterator[None]:
        assert self._sums is not None
        with self._sums.micro_batch(), self._passes(last):
            yield

    def _passes(self, last: bool) -> AbstractContextManager[None]:
        if self._ddp is None:
            return nullcontext()
        if self._direct:
            if last:
                self._ddp.reducer.prepare_for_backward([])
            return nullcontext()
        if last:
            return nullcontext()
        return self._ddp.no_sync()

    def finish_grads(self) -> None:
        """See `ParallelStrategy.finish_grads`: DDP's last backward has summed them."""
        if self._reducer is not None:
            self._reducer.finish()
        if self._tree is not None:
            self._tree.finish()
        elif self._sums is not None:
            self._sums.finish()

    def reducers(self) -> list[Reducer]:
        """See `ParallelStrategy`."""
        return [self._reducer] if self._reducer is not None else []

    def scale_grads(self, factor: float) -> None:
        """See `ParallelStrategy.scale_grads`."""
        if grads := self._grads():  # a stage may have no experts
            torch._foreach_mul_(grads, factor)

    def zero_grad(self) -> None:
        """See `ParallelStrategy.zero_grad`."""
        if self._sums is not None:
            self._sums.clear()
        for p in self._parameters.values():
            p.grad = None

    def updated(self) -> None:
        """See `ParallelStrategy.updated`: every rank has made the same update."""

    def gather(self) -> None:
        """See `WithoutExample.gather`."""

    def messages(self) -> list[tuple[str, int, str]]:
        """For traces: the buckets, in the order in which backward sends them."""
        if self._ddp is None:
            return []
        names = list(self._parameters)
        log = self._ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        made = []
        for i, indices in enumerate(_buckets(log)):
            inside = [names[n] for n in indices]
            what = inside[0] if len(inside) == 1 else f"{inside[0]} to {inside[-1]}"
            elements = sum(self._parameters[n].numel() for n in inside)
            parts = [("all_reduce", elements)] if self._tree is None else self._tree.messages(elements)
            made += [(kind, numbers, f"bucket {i}: {what}") for kind, numbers in parts]
        return made

    def _grads(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters.values() if p.grad is not None]


def _reach(order: Sequence[torch.Tensor], ddp: DistributedDataParallel) -> None:
    """A backward pass through DDP's reducer that gives each of these parameters a gradient of zeros, in that order."""
    made = torch.zeros((), dtype=torch.float64)
    for p in reversed(order):  # the newest part of a graph comes first
        made = made + p.reshape(-1)[:0].sum().to("cpu", torch.float64)
    ddp.reducer.prepare_for_backward([])
    made.backward()  # type: ignore[no-untyped-call]
    ddp.zero_grad(set_to_none=True)


def _buckets(log: Mapping[str, Any]) -> list[list[int]]:
    """The numbers of the parameters of each bucket, from torch's private log; empty if the log does not have them."""
    text = str(log.get("rebuilt_per_bucket_param_indices") or log.get("initial_per_bucket_param_indices") or "")
    return [[int(n) for n in bucket.split()] for bucket in text.split(",") if bucket.strip()]
