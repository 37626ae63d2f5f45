"""The inputs and results of a plan, as plain values. All sizes in bytes.

Runs anywhere. Plain python: no torch, no ray.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

ROOT = -1
"""Unit of the parameters that belong to no block."""

P = ParamSpec("P")
R = TypeVar("R")


def _once(method: Callable[Concatenate[Model, P], R]) -> Callable[Concatenate[Model, P], R]:
    """Keeps what a method of a `Model` returns for the same arguments."""

    @wraps(method)
    def call(self: Model, /, *args: P.args, **kwargs: P.kwargs) -> R:
        key = (method.__name__, args, *kwargs.items())
        if key not in self._known:
            self._known[key] = method(self, *args, **kwargs)
        found: R = self._known[key]
        return found

    return call


def times(ranks: int, replicas: Fraction | None) -> int:
    """Ranks that hold a parameter with these `replicas` where so many hold one without."""
    return ranks if replicas is None else max(int(ranks * replicas), 1)


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter, as a rank has it. `unit`: the number of its block, or ROOT.

    `whole`: its shape in the model, if tensor parallel ranks have parts of it; None: they have all of it. `replicas`: of an
    expert on several ranks, how many times as many ranks hold it as hold parameters of no expert: tensor / expert; else None.
    """

    name: str
    shape: tuple[int, ...]
    trained: bool
    unit: int
    whole: tuple[int, ...] | None = None
    replicas: Fraction | None = None

    def part(self, ranks: int) -> int:
        """Elements of the largest shard over `ranks` ranks: whole rows, split like torch.chunk."""
        return math.prod(self.rows(ranks))

    def rows(self, ranks: int) -> tuple[int, ...]:
        """Shape of that shard."""
        over = 1 if ranks == 1 else times(ranks, self.replicas)
        return (-(-self.shape[0] // over), *self.shape[1:]) if self.shape else ()


@dataclass(frozen=True, slots=True)
class Model:
    """Parameters in the order of the model, as the first rank of a tensor group has them, which has the most; `buffers` in bytes,
    not sharded; in a pipeline its `stages`, in order."""

    params: tuple[Param, ...]
    buffers: int
    stages: tuple[Stage, ...] = ()
    _known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Sums, as methods have returned them: a search of meshes asks for each of them thousands of times."""

    def most_trained(self, ranks: int) -> int:
        """Number of trained parameters of the rank with the most, of `ranks` in a pipeline."""
        if not self.stages:
            return self.size(trained=True)
        return max(sum(s.model.size(trained=True) for s in self.stages[rank::ranks]) for rank in range(ranks))

    @_once
    def by_replicas(self, ranks: int) -> tuple[tuple[Model, int], ...]:
        """Its experts on several ranks and its other parameters, each as a model of its own, with the replicas of it, where there
        are `ranks` of the latter: a strategy of its own works on each."""
        found = []
        for each in dict.fromkeys(p.replicas for p in self.params):
            own = tuple(replace(p, replicas=each and Fraction(1)) for p in self.params if p.replicas == each)
            found.append((Model(own, 0 if each else self.buffers), times(ranks, each)))
        return (*found,)

    @property
    def of_experts(self) -> bool:
        """Whether its parameters are those of experts on several ranks alone, as in a part of `by_replicas`."""
        return all(p.replicas is not None for p in self.params)

    @property
    @_once
    def blocks(self) -> int:
        """The number of its blocks."""
        return sum(stage.blocks for stage in self.stages) or len({p.unit for p in self.params if p.unit != ROOT})

    def size(self, trained: bool = False) -> int:
        """Number of parameters that a rank has; or of the trained ones."""
        return sum(self.units(1, trained).values())

    @_once
    def units(self, ranks: int, trained: bool = False) -> dict[int, int]:
        """Unit -> elements of one rank's part of it, of `ranks`, padded to the largest rank's rows. Not to be changed."""
        found: dict[int, int] = {}
        for p in self.params:
            if p.trained or not trained:
                found[p.unit] = found.get(p.unit, 0) + p.part(ranks)
        return found

    @_once
    def shapes(self, ranks: int) -> list[tuple[int, ...]]:
        """Of one rank's part of each trained parameter. Not to be changed."""
        return [p.rows(ranks) for p in self.params if p.trained]

    @_once
    def whole_in_group(self, ranks: int) -> int:
        """Trained elements of one of `ranks` that each rank of a tensor group has."""
        return sum(p.part(ranks) for p in self.params if p.trained and p.whole is None)

    def whole_size(self, trained: bool = False) -> int:
        """The same of the whole model."""
        return sum(math.prod(p.whole or p.shape) for p in self.params if p.trained or not trained)


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline: its part of the model, its blocks, and its share of the FLOPs of a pass."""

    model: Model
    blocks: int
    share: float


Phase = Literal["start", "forward", "loss", "backward", "end"]


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes at the peak of one phase of a forward and backward pass.

    forward: up to the last block's output; loss: from there until its gradient comes back; backward: the rest.
    `whole`: autocast's copies of weights, and unsharded gradients that wait for the rest of their unit. `loss`: tensors made
    after the last block: logits, log-probabilities, their gradients. `activations`: everything else. `block`: at work, or the one
    before or behind.
    """

    phase: Phase
    whole: int
    activations: int
    loss: int
    block: int = 0

    @property
    def total(self) -> int:
        """Their sum."""
        return self.whole + self.activations + self.loss


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes on a rank besides its state at one moment; see `Estimate`."""

    phase: Phase
    gathered: int
    in_flight: int
    activations: int
    loss: int

    @property
    def total(self) -> int:
        """Their sum."""
        return self.gathered + self.in_flight + self.activations + self.loss


@dataclass(frozen=True, slots=True)
class Activations:
    """One measured micro-batch. `saved`: bytes kept from forward for backward, without weights and their copies; `copied`: copies
    of weights that are kept, too.

    `tensor_sent`: bytes that a rank sends to its tensor and context groups; `exchanged`: to the ranks of experts, if all get as
    many tokens. `passed_on`: bytes of the output that goes to the next stage.
    """

    saved: int
    peaks: tuple[Peak, ...]
    tensor_sent: int = 0
    copied: int = 0
    passed_on: int = 0
    exchanged: int = 0


@dataclass(frozen=True, slots=True)
class Pass:
    """Settings that affect a measurement: a micro-batch, `train.checkpoint_activations`, and how the strategy treats weights.

    `cast`: weights come in the compute format (zero3, hsdp), else autocast casts them. `hold`: the unsharded gradients of a
    unit are kept until all are there, then freed (not in ddp and zero1, where they accumulate in place). `stage`: of a pipeline.
    """

    micro_batch: int
    checkpoint: Literal["none", "full", "selective"]
    cast: bool
    hold: bool
    stage: int = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware: `ranks`, `per_node` of them on each node; `device`: cuda or cpu; `memory` of a device in bytes."""

    ranks: int
    per_node: int
    device: Literal["cuda", "cpu"]
    memory: int | None = None

    @property
    def usable(self) -> int | None:
        """Bytes for training. The rest: the driver's context, NCCL's and cuBLAS's buffers, gaps of the allocator."""
        if self.memory is None:
            return None
        reserve = 2**30 + self.memory // 20 if self.device == "cuda" else 2**29
        return max(self.memory - reserve, 0)

    def with_usable(self, usable: int) -> Machine:
        """The same with devices of which training can use so many bytes."""
        return replace(self, memory=(usable + 2**30) * 20 // 19 if self.device == "cuda" else usable + 2**29)

    @property
    def nodes(self) -> int:
        """Number of nodes; the last one may not be full."""
        return -(-self.ranks // self.per_node)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank sends to other replicas in one step. `across`: hsdp's sums between its groups; the rest is within a
    group."""

    gathers: int
    sums: int
    across: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes of the fullest rank under one strategy, or of each rank of a pipeline, at the moment of its peak (`phase`).

    parameters, gradients, optimizer   permanent state on the device
    buffers      the model's own buffers
    gathered     other ranks' parameters, autocast's copies, unsharded gradients that wait for reduction
    in_flight    buffers of collectives and of transfers between stages
    activations  tensors that forward keeps, and temporary ones
    loss         logits and tensors computed from them
    host, disk   offloaded, of one rank
    copy         of one rank's state, in host memory, for recovery.snapshot_every; 0 without memory checkpoints
    sent         by one rank in one step, to other replicas
    tensor_sent  the same, to its tensor and context groups
    pipeline_sent  the same, to other stages
    exchanged    the same, to the ranks of experts, if all experts get as many tokens
    network      of what is sent in one step, the bytes that go to other nodes, on average over all such ranks
    """

    strategy: str
    shard: int
    phase: Phase
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    gathered: int
    in_flight: int
    activations: int
    loss: int
    host: int
    disk: int
    copy: int
    sent: int
    tensor_sent: int
    pipeline_sent: int = 0
    exchanged: int = 0
    network: int = 0

    @property
    def within_node(self) -> int:
        """Of what is sent in one step, the bytes that stay on the node."""
        return self.sent + self.tensor_sent + self.pipeline_sent + self.exchanged - self.network

    @property
    def state(self) -> int:
        """Parameters, gradients and optimizer."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All bytes on the device."""
        return self.state + self.buffers + self.gathered + self.in_flight + self.activations + self.loss
