"""What a strategy, an optimizer and a compressor declare about themselves in their files, under the name `PLAN`.

Runs anywhere: neither torch nor pydantic, so that `raydist --help` stays fast. `raydist plan` computes memory and traffic from a
PLAN, and the checks of a job use it. It is read with `raydist.registry.described`, without importing the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from raydist import registry

if TYPE_CHECKING:
    from raydist.spec.models import JobSpec
    from raydist.spec.training import OptimSpec

State = Literal["parameters", "gradients", "optimizer"]


@dataclass(frozen=True, slots=True)
class StrategyPlan:
    """How a strategy divides the training state over the ranks, and what it sends.

    `sharded`: the parts of the state of which a rank holds its rows only. Parts that are not named are whole on every rank. The
    default traffic of a step, by ring algorithms, and the default buffers follow from it:

    - nothing sharded: an all-reduce of the gradients in buckets, once a step (ddp);
    - optimizer: a reduce-scatter of the gradients, once a step, and an all-gather of the fp32 parameters (zero1); with gradients
      sharded, the reduce-scatter is in every micro-batch (zero2);
    - parameters: an all-gather of each block before its forward and backward pass, and a reduce-scatter in every micro-batch
      (zero3).

    `group(spec, replicas, replicas_per_node)`: the replicas that hold one copy of the sharded state together; default: all of them.
    Copies all-reduce their gradients once a step (hsdp). A replica is one rank, or with tensor parallel layers a group of them.
    `traffic(spec, machine, model)` replaces the default traffic: bytes that a rank sends a step, as (gathers, sums, across).
    `in_flight(spec, machine, model)` replaces the default buffers: bytes that a rank holds beside the state. `machine` and `model`
    are `Machine` and `Model` of raydist/planner/facts.py: all ranks, and what one rank has of a replica.
    `bucketed`: `parallel.bucket_mb` sets the size of its gradient buckets.
    `compresses`: it sends gradients as `comm.compress` says.
    `parts`: it sums gradients along the tree of `train.virtual_ranks`.
    `local_steps`: it goes with `comm.every`: of the replicas that then train apart, which are its `group`s or else single ones,
    each has a strategy of its own, with a mesh of that replica alone.
    `without_example`: its class is a `WithoutExample` of raydist/worker/parallel, as `raydist.session` needs; if it shards nothing,
    gradients are summed when the last backward pass of a step ends.
    `experts`: the strategy of experts that are on several ranks, if it is another: their replicas need not make whole groups.
    """

    sharded: tuple[State, ...] = ()
    group: Callable[[JobSpec, int, int], int] | None = None
    traffic: Callable[[JobSpec, Any, Any], tuple[int, int, int]] | None = None
    in_flight: Callable[[JobSpec, Any, Any], int] | None = None
    bucketed: bool = False
    compresses: bool = False
    parts: bool = False
    local_steps: bool = False
    without_example: bool = False
    experts: str | None = None


@dataclass(frozen=True, slots=True)
class OptimizerPlan:
    """What an optimizer keeps, and what it needs.

    `state_bytes(name, shape, optim)`: bytes of its state for the part of a parameter that a rank updates.
    `whole_matrices`: it needs whole matrices, so it does not go with a strategy that splits them into rows.
    `offload`: raydist/worker/optim/offload computes the same update in host memory.
    """

    state_bytes: Callable[[str, tuple[int, ...], OptimSpec], int]
    whole_matrices: bool = False
    offload: bool = False


@dataclass(frozen=True, slots=True)
class CompressorPlan:
    """What a compressor does by default, and what it sends.

    `feedback`: what it loses of a gradient is added to the next one, unless the job says otherwise. `bits`: that it sends for each
    gradient with its default options, about; `bits_of(options, shapes)`: with those of a job, for parameters of these shapes, of
    which there may be none. `outer`: it may round outer gradients (`comm.every`), without error feedback; what becomes
    of a number then depends on the numbers of its block of `align` alone, as ranks have parameters in common beside others.
    `loss_increase`: what it added to the loss with these options, in nats a byte, in the training of docs/how-to/communication.md
    (320 steps of a small GPT from scratch), 0 where that is within the spread of seeds; None: not known, `auto` does not take it.
    `checks_shapes`: its `refuse` refuses models by the shapes of their parameters; it is called before workers start, too.
    """

    feedback: bool = False
    bits: float = 32.0
    outer: bool = False
    loss_increase: float | None = None
    checks_shapes: bool = False
    bits_of: Callable[[Mapping[str, Any], Sequence[Sequence[int]]], float] | None = None


def sides(shape: Sequence[int]) -> tuple[int, int, int]:
    """A gradient of two or more dimensions as (matrices, rows, columns): the experts of a layer, [E, r, c], are E matrices, if the
    factors are then smaller than of one matrix whose rows are the first dimension, as a convolution's are not."""
    whole = 1, shape[0], math.prod(shape[1:])
    stack = math.prod(shape[:-2]), shape[-2], shape[-1]
    return min((whole, stack), key=lambda form: form[0] * (form[1] + form[2]))


def strategy_plan(name: str) -> StrategyPlan | None:
    """The PLAN of a strategy; None where its file has none."""
    found = registry.described("parallel", name, "PLAN")
    return found if isinstance(found, StrategyPlan) else None


def buckets(strategy: str) -> bool:
    """Whether `parallel.bucket_mb` has an effect under a strategy."""
    plan = strategy_plan(strategy)
    return plan is not None and plan.bucketed


def optimizer_plan(name: str) -> OptimizerPlan | None:
    """The PLAN of an optimizer; None where its file has none."""
    found = registry.described("optimizer", name, "PLAN")
    return found if isinstance(found, OptimizerPlan) else None


def compressor_plan(name: str) -> CompressorPlan | None:
    """The PLAN of a compressor; None where its file has none."""
    found = registry.described("compressor", name, "PLAN")
    return found if isinstance(found, CompressorPlan) else None


@cache
def strategies() -> tuple[str, ...]:
    """The built-in strategies that have a PLAN. Those that shard less come first; of these, those that shard within groups. So in
    most cases the one that sends least comes first."""
    plans = {name: plan for name in registry.names("parallel") if (plan := strategy_plan(name)) is not None}
    return tuple(sorted(plans, key=lambda name: (len(plans[name].sharded), plans[name].group is None, name)))
