"""The bytes that a rank sends in a step, by strategy.

Runs anywhere. Plain python: no torch, no ray. Strategies may count their own, in the PLAN of their file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from raydist.extension_plans import StrategyPlan, buckets, compressor_plan
from raydist.planner.facts import ROOT, Activations, Machine, Model, Traffic
from raydist.planner.shares import BYTES, FP32, parts_of, plan_of, replicas, shard_of, units
from raydist.spec.comm import sent_bytes

if TYPE_CHECKING:
    from raydist.spec import JobSpec

_DDP_BUCKET_MB = 25.0  # torch's default
_FIRST_BUCKET = 2**20  # dist._DEFAULT_FIRST_BUCKET_BYTES


def traffic(strategy: str, spec: JobSpec, machine: Machine, model: Model) -> Traffic:
    """Bytes that one rank sends to other replicas in one step, by ring algorithms, without the few bytes of the norm and the
    loss. With comm.every on average: what an outer step sends, divided by the steps."""
    made = Traffic(0, 0, 0)
    for one, _, _ in traffic_of_parts(strategy, spec, machine, model):
        made = Traffic(made.gathers + one.gathers, made.sums + one.sums, made.across + one.across)
    return made


def traffic_of_parts(
    strategy: str, spec: JobSpec, machine: Machine, model: Model
) -> Iterator[tuple[Traffic, int, int]]:
    """The same of experts on several ranks and of all other parameters, each with the ranks that hold them, and the number of these
    that hold one copy of the sharded state."""
    ranks, shard = replicas(spec, machine), shard_of(strategy, spec, machine)
    plan = plan_of(strategy)
    if plan.traffic is not None and ranks > 1:
        yield Traffic(*plan.traffic(spec, machine, model)), ranks, shard
        return
    for part, over, over_shard in parts_of(strategy, spec, machine, model):
        yield _traffic(plan, spec, machine, part, over, over_shard), over, over_shard


def _traffic(plan: StrategyPlan, spec: JobSpec, machine: Machine, model: Model, ranks: int, shard: int) -> Traffic:
    """Of parameters that so many ranks hold, `shard` of them one copy of the sharded state."""
    if ranks == 1:
        return Traffic(0, 0, 0)
    count = spec.batches(machine.ranks)[1]
    copies = ranks // shard if "parameters" in plan.sharded else 1
    compute, reduce = BYTES[spec.precision.params], sent_bytes(spec, model.shapes(shard if copies > 1 else 1))
    every = spec.comm.every
    if every is not None:
        reduce = outer_bytes(spec) / every
    if not plan.sharded:
        return Traffic(0, round(2 * (ranks - 1) / ranks * model.size(trained=True) * reduce), 0)
    grads = sum(units(model, shard, trained=True).values())
    if "parameters" not in plan.sharded:
        each = (ranks - 1) * grads
        return Traffic(each * FP32, round(each * reduce * (count if "gradients" in plan.sharded else 1)), 0)
    parts = units(model, shard)
    once = parts.pop(ROOT, 0)
    blocks = [parts[i] for i in sorted(parts)]
    match spec.parallel.reshard_after_forward:
        case False:
            gathers = once + sum(blocks)
        case True:
            gathers = once + 2 * sum(blocks)
        case _:
            gathers = once + 2 * sum(blocks[:-1]) + sum(blocks[-1:])
    across = 2 * (copies - 1) / copies * grads * reduce
    each = (shard - 1) * count
    # Of several copies only what goes between them is compressed.
    within = reduce if copies == 1 and every is None else BYTES[spec.precision.reduce]
    return Traffic(each * gathers * compute, round(each * grads * within), round(across))


def last_share(strategy: str, spec: JobSpec, machine: Machine, model: Model) -> float:
    """Share of a step's sums that is sent after the last backward pass, and of its gathers before the first forward pass: what no
    computation overlaps. The last bucket of ddp; else the parameters of no block, or where every one is in a block, one block.
    Experts on several ranks have buckets of their own: the share is of the bytes of both."""
    plan = plan_of(strategy)
    shares = []
    for part, over, over_shard in parts_of(strategy, spec, machine, model):
        sent = _traffic(plan, spec, machine, part, over, over_shard)
        shares.append((sent.gathers + sent.sums, _last_share(strategy, spec, part)))
    whole = sum(sent for sent, _ in shares)
    return sum(sent * share for sent, share in shares) / whole if whole else 0.0


def _last_share(strategy: str, spec: JobSpec, model: Model) -> float:
    whole = model.size(trained=True)
    if not whole:
        return 0.0
    if buckets(strategy):
        # torch's first bucket has 1 MiB, so that sums begin early.
        rest = whole - _FIRST_BUCKET / FP32
        bucket = ddp_bucket(spec) / FP32
        return 1.0 if rest <= 0 else min(rest % bucket or bucket, whole) / whole
    found = units(model, 1, trained=True)
    return found.get(ROOT, 0) / whole or max(found.values()) / whole


def tensor_traffic(strategy: str, spec: JobSpec, machine: Machine, model: Model, activations: Activations) -> int:
    """Bytes that one rank sends to its tensor and context groups in one step: those of the passes, as measured, and the sum over
    the tensor group of its gradients of parameters that are whole there, of which it has the rows that the strategy gives it."""
    ranks = spec.parallel.tensor
    shard = shard_of(strategy, spec, machine)
    whole = model.whole_in_group(shard) if ranks > 1 else 0
    passes = spec.batches(machine.ranks)[1] * activations.tensor_sent
    return passes + round(2 * (ranks - 1) / ranks * whole * FP32)


def outer_bytes(spec: JobSpec) -> float:
    """Of one number of an outer gradient, as it is sent."""
    plan = compressor_plan(spec.comm.compress) if spec.comm.rounds else None
    return plan.bits / 8 if plan is not None else FP32


def outer_sent(spec: JobSpec, numbers: int) -> int:
    """Bytes of a buffer that has one fragment, as it is sent."""
    return round(outer_bytes(spec) * numbers / spec.comm.fragments)


def ddp_bucket(spec: JobSpec) -> float:
    """Bytes of a bucket in fp32."""
    asked = spec.parallel.bucket_mb
    return (_DDP_BUCKET_MB if asked is None or asked == "auto" else asked) * 2**20
