"""How a job's batches, weights and state are divided over its ranks, for the other files of the planner.

Runs anywhere. Plain python: no torch, no ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raydist.extension_plans import StrategyPlan, strategies, strategy_plan
from raydist.planner.facts import Machine, Model

if TYPE_CHECKING:
    from raydist.spec import JobSpec

FP32 = 4
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def replicas(spec: JobSpec, machine: Machine) -> int:
    """Copies of the weights, over which strategies split the state: replicas of the model, and in them the ranks that share
    sequences."""
    return machine.ranks * spec.parallel.context // spec.parallel.replica


def planned(spec: JobSpec) -> tuple[str, ...]:
    """The strategies that can be planned, in the order of preference: the built-in ones, and the job's own where it has a PLAN."""
    own, built_in = spec.parallel.strategy, strategies()
    return built_in if own in built_in or strategy_plan(own) is None else (*built_in, own)


def plan_of(strategy: str) -> StrategyPlan:
    """The PLAN of a strategy that `planned` has."""
    plan = strategy_plan(strategy)
    assert plan is not None, strategy
    return plan


def shard_of(strategy: str, spec: JobSpec, machine: Machine) -> int:
    """Replicas that share one copy of the state that the strategy shards: of each rank of a tensor group, its part."""
    plan = plan_of(strategy)
    if not plan.sharded:
        return 1
    count, on_node = replicas(spec, machine), max(machine.per_node // spec.parallel.tensor, 1)
    return count if plan.group is None else plan.group(spec, count, on_node)


def parts_of(strategy: str, spec: JobSpec, machine: Machine, model: Model) -> list[tuple[Model, int, int]]:
    """Its experts on several ranks and its other parameters, each as a model of its own, with the ranks that hold them, and the
    number of these that hold one copy of the sharded state: of experts all, where they have another strategy."""
    ranks, shard, apart = (
        replicas(spec, machine),
        shard_of(strategy, spec, machine),
        plan_of(strategy).experts is not None,
    )
    both = zip(model.by_replicas(ranks), model.by_replicas(shard), strict=True)
    return [(part, over, over if apart and part.of_experts else of_copy) for (part, over), (_, of_copy) in both]


def units(model: Model, ranks: int, trained: bool = False) -> dict[int, int]:
    """Unit -> elements of one rank's part of it, padded to the largest rank's rows."""
    return {**model.units(ranks, trained)}
