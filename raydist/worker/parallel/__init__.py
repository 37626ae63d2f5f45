"""Parallel strategies, which split the work over the ranks: one per file, found by name.

A strategy's file (or the user's `package.module:attribute`) has a class `Strategy`. The loop calls it in this order:

    strategy = Strategy(spec, mesh)
    module = strategy.wrap(model, example)         # every rank, once; checks the graph; does not change weights
    optimizer = optim.build(strategy.shards(), ...)
    with strategy.accumulate(last=True): ...       # around each micro-batch's forward and backward
    strategy.finish_grads()                        # after the last backward: every shard has its gradient
    strategy.scale_grads(factor)
    optimizer.step()
    strategy.zero_grad()
    strategy.updated()                             # the weights that other ranks hold are stale

A caller without an example, such as a training loop of the user's own, gives None to the strategies that take it
(`WithoutExample`). It checks its first loss with `check_loss` of _model_graph.py, calls the model given to `wrap`, and
`accumulate` is around each backward pass alone.

A strategy may leave out `parts`, `passes`, `messages`, `reducers` and `reduces_together`: `build` takes those of
`ParallelStrategy` then.

At the top level of the file, without torch (raydist/registry.py, `described`), there may be `PLAN: StrategyPlan`
(raydist/extension_plans.py) for `raydist plan`; `Options`, a pydantic model of `parallel.options`; `check_spec(spec: JobSpec)`,
which raises `raydist.spec.parts.problem(...)`; and `VARIANTS`, name -> fields of `parallel`, for more runs of tests/contracts.

In a pipeline each stage has a strategy of its own (_pipeline.py). Forward passes of several micro-batches then come before the
backward pass of the first; they call the model given to `wrap`, and `accumulate` is around each backward pass alone.

A strategy splits along the data axis of the mesh only: it uses `mesh.data_rank`, `mesh.data_size`, `mesh.group("data")` and
`mesh.data_mesh`, never the world's. What a rank has of the model may itself be a part, of tensor parallel layers.

The loop divides by the tokens of the global batch, so reduced gradients must be sums over the replicas, never means. A strategy
whose reduction averages sets `loss_factor`. The loop computes the norm of the whole gradient from the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from raydist import registry
from raydist.data.batches import MicroBatch
from raydist.spec import JobSpec
from raydist.worker.loss import unwrapped
from raydist.worker.mesh import Mesh
from raydist.worker.parts import Parts

if TYPE_CHECKING:
    from raydist.worker.comm.compression.reducer import Reducer


class Example(Protocol):
    """Runs forward on `samples` samples of the right shape and returns the loss, for the graph check in `wrap`."""

    def __call__(self, module: nn.Module, samples: int = 1, part: bool = False) -> torch.Tensor:
        """The sum of their losses; if `module` is a part of the model that gives no loss, of its output."""


class Work(Protocol):
    """The work on each micro-batch in a series of passes: training, a diagnosis or an evaluation."""

    trains: bool
    """Whether there are backward passes."""

    def around(self, index: int) -> AbstractContextManager[Any]:
        """A context from before the forward pass of micro-batch `index` to after its backward pass. Several may be open."""

    def forward(self, module: nn.Module, index: int, batch: MicroBatch, part: bool = False) -> torch.Tensor:
        """The loss of a micro-batch, summed over its tokens: a scalar. If `module` is a `part` of the model that gives no loss, its
        output."""

    def backward(self, index: int, made: torch.Tensor | GradientEdge, grad: torch.Tensor | None = None) -> None:
        """Computes gradients of what `forward` made, in ascending order of `index` for each part of the model. Of an output of a
        part, which may be given as its place in the graph, `grad` is the gradient."""


def in_turn(strategy: ParallelStrategy, micro_batches: Sequence[MicroBatch], work: Work) -> None:
    """The passes of a strategy without `passes`: one micro-batch after another, each forward and backward."""
    parts = strategy.parts
    if not work.trains:
        module = unwrapped(strategy.module)  # DDP's wrapper would synchronize buffers
        for index, batch in enumerate(micro_batches):
            if parts is not None:
                parts.enter(index, len(micro_batches))
            with work.around(index):
                work.forward(module, index, batch)
        return
    for index, batch in enumerate(micro_batches):
        if parts is not None:
            parts.enter(index, len(micro_batches))
        with work.around(index), strategy.accumulate(last=index == len(micro_batches) - 1):
            work.backward(index, work.forward(strategy.module, index, batch))


@dataclass(frozen=True, slots=True)
class ParamShard:
    """The part of one parameter that this rank's optimizer updates: the whole parameter, or some of its rows.

    `local`: a plain parameter that shares the memory of the model's parameter; it has a gradient after `finish_grads`.
    `like`: for rows, a DTensor of the whole parameter, whose placements say which rank has which rows; None if `local` is whole.
    """

    local: nn.Parameter
    like: DTensor | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole parameter."""
        return self.local.shape if self.like is None else self.like.shape

    @property
    def first_row(self) -> int:
        """Which row of the whole parameter is the first of `local`."""
        if self.like is None:
            return 0
        _, offsets = compute_local_shape_and_global_offset(self.like.shape, self.like.device_mesh, self.like.placements)
        return offsets[0]

    @property
    def columns(self) -> tuple[int, int]:
        """(which, of how many): the part of each row that this rank has, of layers that are split along another dimension."""
        if self.like is not None:
            devices = self.like.device_mesh
            coordinate = devices.get_coordinate()
            for axis, placement in enumerate(self.like.placements):
                if isinstance(placement, Shard) and placement.dim > 0 and coordinate is not None:
                    return coordinate[axis], devices.size(axis)
        return 0, 1

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """A DTensor of a tensor like `local` (a moment of the optimizer), with its place in the whole. No copy, no collective."""
        if self.like is None or local.shape != self.local.shape:
            return local
        meta = TensorMeta(self.like.shape, self.like.stride(), local.dtype)
        spec = DTensorSpec(self.like.device_mesh, self.like.placements, tensor_meta=meta)
        # Not `from_local`, which would move a moment in host memory to the mesh's device.
        return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


class ParallelStrategy(Protocol):
    """The interface of the class `Strategy` in each file of this folder."""

    module: nn.Module
    """The module to call forward on."""

    takes_meta: bool
    """Whether `wrap` takes a model without weights, on the meta device, if its `build` has `takes_meta`: see worker/model."""

    loss_factor: float
    """The factor of each rank's loss before backward: the number of replicas if the reduction averages, else 1."""

    on_final: Callable[[Sequence[torch.Tensor]], None] | None
    """If set, called in the backward of the last micro-batch with those `local`s whose gradient is final except for scaling, on
    the stream that computes it. A strategy may report only some of them, or none, before `finish_grads`."""

    parts: Parts | None = None
    """Set before `wrap`: gradients of parts of the global batch are summed along their tree (worker/parts.py). With `parts=True` in
    its PLAN."""

    def __init__(self, spec: JobSpec, mesh: Mesh) -> None: ...

    def wrap(self, model: nn.Module, example: Example) -> nn.Module:
        """Moves the model to its device and distributes it. Raises GraphMismatch, which names parameters and ranks."""

    def shards(self) -> Mapping[str, ParamShard]:
        """The parts that this rank's optimizer updates, by the names of the plain model's `named_parameters`, in their order."""

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """A context around one micro-batch. In the `last` one of a step the gradients are reduced over all ranks, if not before."""

    def finish_grads(self) -> None:
        """Called after the last backward of a step. After it every shard has its gradient, summed over the replicas."""

    def scale_grads(self, factor: float) -> None:
        """Multiplies the gradients in place."""

    def zero_grad(self) -> None:
        """Drops all gradients."""

    def updated(self) -> None:
        """Call it when shards have new values, from an update or a checkpoint: the next forward pass uses them on all ranks."""

    def passes(self, micro_batches: Sequence[MicroBatch], work: Work) -> None:
        """Runs all passes of these micro-batches, in an order of the strategy's own. Every rank. Default: `in_turn`."""
        in_turn(self, micro_batches, work)

    def messages(self) -> list[tuple[str, int, str]]:
        """The collectives of a step, in the order of the calls: (kind, input elements of one rank, name in `raydist trace`)."""
        return []

    def reducers(self) -> list[Reducer]:
        """After `wrap`: what sends its gradients as `comm.compress` says (worker/comm/compression). With `compresses=True` in its
        PLAN."""
        return []

    def reduces_together(self) -> int:
        """Ranks of the data axis that reduce the gradient of each of `parts` together; 1 where each rank adds up whole gradients
        first."""
        return 1


class WithoutExample(ParallelStrategy, Protocol):
    """A strategy with `without_example=True` in its PLAN."""

    def wrap(self, model: nn.Module, example: Example | None) -> nn.Module:
        """See `ParallelStrategy.wrap`. Without an example no forward pass is made, and the graph is not checked."""

    def gather(self) -> None:
        """Returns once each rank has the newest values of all weights that it holds whole. A collective."""


_OPTIONAL = ("parts", "passes", "messages", "reducers", "reduces_together")


def build(spec: JobSpec, mesh: Mesh) -> ParallelStrategy:
    """The strategy that the job names. A class that is not derived from `ParallelStrategy` gets its defaults."""
    made: ParallelStrategy = registry.load("parallel", spec.parallel.strategy)(spec, mesh)
    for name in _OPTIONAL:
        if not hasattr(made, name):
            default = getattr(ParallelStrategy, name)
            setattr(made, name, MethodType(default, made) if callable(default) else default)
    return made
