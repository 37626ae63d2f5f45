"""Parameters, gradients and optimizer state split over the ranks: torch's FSDP2 (`fully_shard`), for zero3 and hsdp.

Runs in: each train worker. Torch, never ray.

The unit is a block: its parameters are gathered before its forward pass, freed after it, and gathered again for backward. All
parameters outside of blocks (embedding, last norm, head, which may be tied) are one unit, the root. It stays gathered from the
forward pass through the backward pass, because it is used first and last. The last block stays, too: backward starts with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from raydist.errors import UserError
from raydist.spec import JobSpec
from raydist.worker.comm import gloo_p2p
from raydist.worker.comm.compression.reducer import Reducer
from raydist.worker.mesh import Mesh
from raydist.worker.parallel import Example, ParamShard, WithoutExample
from raydist.worker.parallel._fsdp_compression import CompressedCopies, CompressedReduceScatter, units
from raydist.worker.parallel._fsdp_parts import PartCopies, PartReduceScatter
from raydist.worker.parallel._model_graph import blocks_of, check_graph, initialise, refuse_scalars, tied_across, weakly
from raydist.worker.parallel._tree_all_reduce import TreeAllReduce
from raydist.worker.parts import Parts, WholeSums
from raydist.worker.precision import DTYPES


class FullyShardedStrategy(WithoutExample, ABC):
    """See `ParallelStrategy`. Each strategy's file defines `mesh`, the ranks to split over."""

    module: nn.Module
    on_final: Callable[[Sequence[torch.Tensor]], None] | None = None

    def __init__(self, spec: JobSpec, mesh: Mesh) -> None:
        self._spec, self._mesh, self._rank = spec, mesh, mesh.rank
        # FSDP's reduction averages; a sum along a tree does not.
        self.loss_factor = float(mesh.data_size) if spec.train.virtual_ranks is None else 1.0
        self.takes_meta = mesh.data_size > 1
        self._reducer: Reducer | None = None
        self._copies: list[CompressedCopies] = []
        self._scatters: list[PartReduceScatter] = []
        self._between = False
        """Whether FSDP2 gets one copy only, and the sum over the copies follows in a hook."""

    @abstractmethod
    def devices(self) -> DeviceMesh:
        """The ranks of the data axis; along the last dimension are the ranks that share one copy of the state."""

    def wrap(self, model: nn.Module, example: Example | None) -> nn.Module:
        """See `ParallelStrategy.wrap`. Runs `example`, if there is one, twice, sharded. The model's parameters move to the device
        block by block."""
        names = [n for n, p in model.named_parameters() if p.requires_grad]
        refuse_scalars(model)
        if self._mesh.data_size > 1 and (tied := tied_across(model)):  # each block would get its own copy
            shown = "; ".join(" = ".join(same) for same in tied.values())
            raise UserError(
                f"{shown}: one parameter in several blocks, or in a block and outside",
                "use parallel.strategy: zero2, zero1 or ddp, which keep it as one; zero3 and hsdp split block by block",
            )
        self.module = model
        if self._mesh.data_size == 1:
            model.to(self._rank.device)
        else:
            self._fully_shard(model)
        if example is not None:
            self._check(model, example)
        self._sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        named = dict(model.named_parameters())
        self._parameters = {n: named[n] for n in names}
        self._shards = {n: _shard(p, self._devices if self._between else None) for n, p in self._parameters.items()}
        self._last = True
        alone = self.parts is not None and self._mesh.data_size == 1
        self._whole = WholeSums(self.parts, [*self._parameters.values()]) if alone and self.parts is not None else None
        offload = self._spec.offload
        if offload.optimizer != "none" and offload.parameters == "none":
            # FSDP calls the hook with the reduced gradient; with parameters in host memory it would wait for the copy first.
            for n, p in self._parameters.items():
                p.register_post_accumulate_grad_hook(weakly(self._has_gradient, n))  # type: ignore[no-untyped-call]
        self.zero_grad()
        return model

    def _check(self, model: nn.Module, example: Example) -> None:
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(False)  # ranks with different graphs would wait for each other
        check_graph(model, lambda: example(model), self._mesh)
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(True)
            example(model).backward()  # type: ignore[no-untyped-call]  # reduces the unsharded gradients that the check left, too
        for name, b in model.named_buffers():
            b.copy_(buffers[name])

    def _fully_shard(self, model: nn.Module) -> None:
        parallel, precision = self._spec.parallel, self._spec.precision
        compute = DTYPES[precision.params]
        on_cuda = self._rank.device.type == "cuda"
        offload = CPUOffloadPolicy(pin_memory=on_cuda) if self._spec.offload.parameters == "cpu" else OffloadPolicy()
        # Parameters are gathered in the format that autocast casts them to anyway: half the bytes. Autocast still chooses the
        # format of activations, so norms, softmax and loss are in fp32 here, too.
        # With virtual ranks the passes must be those of one rank, which has fp32 parameters that autocast casts where it does.
        policy = MixedPrecisionPolicy(
            param_dtype=None if compute is torch.float32 or self.parts is not None else compute,
            reduce_dtype=DTYPES[precision.reduce],
            cast_forward_inputs=False,
        )
        self._devices = self.devices()
        copies = self._devices.size(0) if self._devices.ndim > 1 else 1
        # FSDP2 has no hook in place of its own all-reduce.
        self._between = (self._spec.comm.compresses or self.parts is not None) and copies > 1
        inner = self._devices["shard"] if self._between else self._devices
        named = dict(blocks_of(model))
        blocks = list(named.values())
        keep = {"auto": blocks[-1:], True: [], False: blocks}[parallel.reshard_after_forward]

        def split(module: nn.Module, stays: bool) -> None:
            fully_shard(module, mesh=inner, reshard_after_forward=not stays, mp_policy=policy, offload_policy=offload)

        for name in _initialised_blocks(model, named):
            split(named[name], any(named[name] is kept for kept in keep))
        split(model, stays=True)
        self._use_direct_collectives(model)
        if self.parts is not None:
            self._sum_parts(model, self.parts)
        elif self._between:
            self._compress_between(model, copies)
        elif self._spec.comm.compresses and self._devices.size(self._devices.ndim - 1) > 1 and copies == 1:
            self._compress(model)
        for i, block in enumerate(blocks):
            assert isinstance(block, FSDPModule)
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + parallel.prefetch])  # type: ignore[arg-type]
            block.set_modules_to_backward_prefetch(blocks[max(i - parallel.prefetch, 0) : i][::-1])  # type: ignore[arg-type]

    def _use_direct_collectives(self, model: nn.Module) -> None:
        """Replaces torch's collectives in FSDP2, on gloo, with direct ones from rank to rank."""
        if not gloo_p2p.direct(self._devices.get_group(self._devices.ndim - 1)):
            return
        reduce_scatter, all_gather = gloo_p2p.DirectReduceScatter(), gloo_p2p.DirectAllGather()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(reduce_scatter)  # type: ignore[arg-type]
                module.set_custom_all_gather(all_gather)  # type: ignore[arg-type]

    def _sum_parts(self, model: nn.Module, parts: Parts) -> None:
        """Gradients are summed along a tree as they are scattered, and then between copies."""
        first = self._mesh.data_rank // parts.together * parts.together
        rooms: dict[str, torch.Tensor] = {}
        between = None
        if self._between:
            group = self._devices.get_group(0)
            between = TreeAllReduce(parts.tree, parts.nodes_of_copies(), group, self._rank.device, aside=False)
        for module, _ in units(model):
            scatter = PartReduceScatter(parts, range(first, first + parts.together), rooms)
            module.set_custom_reduce_scatter(scatter)
            self._scatters.append(scatter)
            if between is not None:
                module.set_all_reduce_hook(PartCopies(parts, scatter, between, self._devices.get_group(0)))

    def reduces_together(self) -> int:
        """See `ParallelStrategy`: the ranks of one copy."""
        return self.ranks_per_copy() if self._mesh.data_size > 1 else 1

    @abstractmethod
    def ranks_per_copy(self) -> int:
        """Ranks of the data axis that share one copy of the state. A collective at the first call."""

    def _compress(self, model: nn.Module) -> None:
        """Gradients are compressed as they are scattered to all ranks."""
        group = self._devices.get_group(self._devices.ndim - 1)
        reducer = Reducer(
            self._spec.comm, group, self._rank.device, factor=self.loss_factor, aside=False, part=self._mesh.part
        )
        for module, parameters in units(model):
            piece = reducer.packed({name: p.shape for name, p in parameters.items()})
            module.set_custom_reduce_scatter(CompressedReduceScatter(reducer, piece))
        reducer.refuse()
        self._reducer = reducer

    def _compress_between(self, model: nn.Module, copies: int) -> None:
        """Gradients are summed plainly within a copy, and compressed between copies."""
        group, ranks = self._devices.get_group(0), self._devices.size(1)
        part = "-".join(filter(None, (self._mesh.part, f"rows-{self._devices.get_local_rank(1)}-of-{ranks}")))
        reducer = Reducer(
            self._spec.comm,
            group,
            self._rank.device,
            factor=float(copies),
            aside=False,
            part=part,
        )
        for module, parameters in units(model):
            # As FSDP2 pads them: all ranks of a copy have as many rows.
            shapes = {name: torch.Size([-(-p.shape[0] // ranks), *p.shape[1:]]) for name, p in parameters.items()}
            hook = CompressedCopies(reducer, shapes, group)
            module.set_all_reduce_hook(hook)
            self._copies.append(hook)
        reducer.refuse()
        self._reducer = reducer

    def reducers(self) -> list[Reducer]:
        """See `ParallelStrategy`."""
        return [self._reducer] if self._reducer is not None else []

    def shards(self) -> Mapping[str, ParamShard]:
        """See `ParallelStrategy.shards`: this rank's rows of every parameter."""
        return self._shards

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """See `ParallelStrategy.accumulate`: gradients are reduced to shards in every micro-batch, so a gradient is whole only
        during its block's backward. Only hsdp's all-reduce over the copies waits for the last micro-batch."""
        self._last = last
        for copies in self._copies:
            copies.last = last
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_all_reduce(last)
            self.module.set_is_last_backward(last)
            if self.parts is not None and self.parts.running:
                self._begin_pass(self.module, self.parts)
        return self._whole.micro_batch() if self._whole is not None else nullcontext()

    def _begin_pass(self, module: FSDPModule, parts: Parts) -> None:
        """Gradients stay whole until the last micro-batch of a part. The zeros of the turn before go: FSDP2 would add to them."""
        module.set_requires_gradient_sync(parts.ends)
        module.set_requires_all_reduce(parts.last)
        if parts.begins:
            for p in self._parameters.values():
                p.grad = None

    def _has_gradient(self, name: str, parameter: torch.Tensor) -> None:
        if self._last and self.on_final is not None:
            self.on_final([self._with_gradient(name, parameter)])

    def _with_gradient(self, name: str, parameter: torch.Tensor) -> nn.Parameter:
        local, grad = self._shards[name].local, parameter.grad
        local.grad = grad.to_local() if isinstance(grad, DTensor) else grad
        return local

    def finish_grads(self) -> None:
        """See `ParallelStrategy.finish_grads`: gives each shard the gradient of its parameter."""
        if self._whole is not None:
            self._whole.finish()
        for name, p in self._parameters.items():
            self._with_gradient(name, p)

    def scale_grads(self, factor: float) -> None:
        """See `ParallelStrategy.scale_grads`."""
        if grads := [s.local.grad for s in self._shards.values() if s.local.grad is not None]:
            torch._foreach_mul_(grads, factor)

    def zero_grad(self) -> None:
        """See `ParallelStrategy.zero_grad`."""
        for copies in self._copies:
            copies.drop()
        for scatter in self._scatters:
            scatter.clear()
        if self._whole is not None:
            self._whole.clear()
        for name, p in self._parameters.items():
            p.grad = None
            self._shards[name].local.grad = None

    def updated(self) -> None:
        """See `ParallelStrategy.updated`: the next forward pass gathers the new values. An evaluation, which has no backward pass,
        has left those gathered that stay until one."""
        for module in self._sharded:
            module.reshard()  # does nothing after a step

    def gather(self) -> None:
        """See `WithoutExample.gather`: between passes a rank holds its rows alone."""


def _initialised_blocks(model: nn.Module, blocks: Mapping[str, nn.Module]) -> Iterator[str]:
    """Names of blocks. For a model on the meta device, each one after it got its weights and before the next one gets them."""
    if not any(p.is_meta for p in model.parameters()):
        yield from blocks
        return
    current: str | None = None
    for name in initialise(model):
        if current is not None and not name.startswith(current + "."):
            yield current
            current = None
        if name in blocks:
            current = name
    if current is not None:
        yield current


def _shard(parameter: nn.Parameter, devices: DeviceMesh | None) -> ParamShard:
    """`devices`: (copies, ranks per copy), if FSDP2 knows of one copy only."""
    if not isinstance(parameter, DTensor):
        return ParamShard(parameter)
    # Shares the shard's memory. A plain tensor, because fused kernels on DTensors cost milliseconds of dispatch per step.
    whole = parameter.detach()
    assert isinstance(whole, DTensor)
    if devices is not None:
        whole = DTensor.from_local(
            whole.to_local(),
            devices,
            [Replicate(), *whole.placements],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
    return ParamShard(nn.Parameter(whole.to_local(), requires_grad=True), whole)
