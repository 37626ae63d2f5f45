"""The bytes that a rank holds, by strategy, for `raydist plan`. Those that it sends: traffic.py.

Runs anywhere. Plain python: no torch, no ray.

Weights, gradients and the update are fp32: 4 bytes a parameter, 4 of gradient, and the optimizer's state (AdamW: 8), divided as the
PLAN in the strategy's file declares (raydist/extension_plans.py; ZeRO, arXiv 1910.02054). The memory of a forward and backward pass
is measured (measure.py), and is given here as `Activations`. The rest follows from worker/parallel/_zero.py,
worker/parallel/_fsdp.py and parallel/ddp.py; tests/planner/test_ranks.py compares it with the memory of real ranks.

With tensor parallel layers `Model` is what one rank of a tensor group has, and strategies divide it over the replicas. In a
pipeline each stage has a strategy of its own, and pipeline.py has the memory of several passes in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from typing import TYPE_CHECKING

from raydist.extension_plans import State, StrategyPlan, optimizer_plan
from raydist.planner.facts import ROOT, Activations, Estimate, Machine, Model, Moment, Param, Pass, Peak
from raydist.planner.links import experts_share, group_share, replicas_network, stages_share
from raydist.planner.pipeline import StageBytes, heaviest_moment
from raydist.planner.shares import BYTES, FP32, parts_of, plan_of, replicas, shard_of, units
from raydist.planner.traffic import ddp_bucket, outer_sent, tensor_traffic, traffic
from raydist.spec.comm import sent_bytes

if TYPE_CHECKING:
    from raydist.spec import JobSpec, OptimSpec

Measure = Callable[[Pass], Activations]
_IN_FLIGHT = 2  # zero1, zero2: units in flight at a time; worker/parallel/_zero.py's IN_FLIGHT
_SWAP_BUFFERS = 4  # nvme: chunks in memory; worker/optim/offload/moments.py's BUFFERS, and hostcopy.py's WINDOW


def refusal(strategy: str, spec: JobSpec, machine: Machine, model: Model) -> str | None:
    """Why raydist would not train this job under that strategy; None if it would."""
    plan, on_host = plan_of(strategy), spec.offload.parameters == "cpu"
    if spec.comm.every is not None and not plan.local_steps:
        return f"comm.every: {spec.comm.every} lets replicas train apart, and it splits the state over them"
    if not plan.sharded or replicas(spec, machine) == 1:
        whole_only = on_host and not plan.sharded
    else:
        whole_only = on_host and "parameters" not in plan.sharded
        optimizer = optimizer_plan(spec.optim.name)
        if optimizer is not None and optimizer.whole_matrices:
            return f"{spec.optim.name} works on whole matrices"
        if scalars := [p.name for p in model.params if not p.shape]:
            return f"{scalars[0]} has no dimension to split"
        count = replicas(spec, machine)
        if plan.group is not None and count % (shard := shard_of(strategy, spec, machine)):
            return f"groups of {shard} do not make {count} {'ranks' if count == machine.ranks else 'replicas'}"
    return "offload.parameters needs them sharded" if whole_only else None


def measured(strategy: str, spec: JobSpec, machine: Machine, model: Model, measure: Measure) -> tuple[Activations, ...]:
    """The measured pass of each stage for a strategy; one without a pipeline."""
    how = measured_pass(strategy, spec, machine)
    return tuple(measure(replace(how, stage=n)) for n in range(max(len(model.stages), 1)))


def measured_pass(strategy: str, spec: JobSpec, machine: Machine) -> Pass:
    """The pass to measure for a strategy."""
    sharded = plan_of(strategy).sharded if replicas(spec, machine) > 1 else ()
    cast = "parameters" in sharded and spec.precision.params != "fp32"
    return Pass(spec.batches(machine.ranks)[0], spec.train.checkpoint_activations, cast, hold="gradients" in sharded)


def estimate(strategy: str, spec: JobSpec, machine: Machine, model: Model, activations: Activations) -> Estimate:
    """A rank with one stage, or the whole model, under `strategy`, one of `planned`. `activations` are those of `measured_pass`."""
    moments, buffers = _moments(strategy, spec, machine, model, activations)
    worst = max(moments, key=lambda moment: moment.total)
    return _estimate(
        strategy, spec, machine, [(model, activations)], replace(worst, in_flight=worst.in_flight + buffers)
    )


def estimates(strategy: str, spec: JobSpec, machine: Machine, model: Model, measure: Measure) -> tuple[Estimate, ...]:
    """Of each rank of a pipeline, in order, for any replica and tensor rank; one without a pipeline."""
    passes = measured(strategy, spec, machine, model, measure)
    if not model.stages:
        return (estimate(strategy, spec, machine, model, passes[0]),)
    ranks, count = spec.parallel.pipeline, spec.batches(machine.ranks)[1]
    found = []
    for rank in range(ranks):
        own = range(rank, len(model.stages), ranks)
        held = []
        for n in own:
            stage = model.stages[n].model
            moments, buffers = _moments(strategy, spec, machine, stage, passes[n])
            entered = passes[n - 1].passed_on if n else 0
            stays = _stays_gathered(strategy, spec, machine, stage)
            held.append(StageBytes(passes[n], moments, entered, buffers, stays))
        moment = heaviest_moment(rank, ranks, count, held, machine.device)
        made = _estimate(strategy, spec, machine, [(model.stages[n].model, passes[n]) for n in own], moment)
        tied = _tied(strategy, spec, machine, model, own)
        ways = [(passes[n].passed_on, n + 1) for n in own] + [(passes[n - 1].passed_on, n - 1) for n in own if n]
        shares = [stages_share(spec, machine, rank, to % ranks) for _, to in ways]
        network = count * sum(size * share for (size, _), share in zip(ways, shares, strict=True))
        network += tied * stages_share(spec, machine, 0, ranks - 1)
        sent = count * sum(size for size, _ in ways) + tied
        found.append(replace(made, pipeline_sent=sent, network=made.network + round(network)))
    return (*found,)


def _tied(strategy: str, spec: JobSpec, machine: Machine, model: Model, own: Sequence[int]) -> int:
    """Bytes that a rank sends to sum the gradients of weights that another rank has, too: of the rows that it updates."""
    having = Counter(p.name for stage in model.stages for p in stage.model.params if p.trained)
    shard = shard_of(strategy, spec, machine) if plan_of(strategy).sharded else 1
    shared = (p for n in own for p in model.stages[n].model.params if having[p.name] > 1)
    return round(sum(2 * (having[p.name] - 1) / having[p.name] * p.part(shard) * FP32 for p in shared))


def _estimate(
    strategy: str,
    spec: JobSpec,
    machine: Machine,
    stages: Sequence[tuple[Model, Activations]],
    moment: Moment,
) -> Estimate:
    """A rank with these parts of the model, which has the most beside its state at `moment`."""
    shard, plan = shard_of(strategy, spec, machine), plan_of(strategy)
    sharded = plan.sharded if replicas(spec, machine) > 1 else ()
    split = [part for model, _ in stages for part in parts_of(strategy, spec, machine, model)]

    def divided(state: State) -> list[tuple[Param, int]]:
        """Each parameter, and the ranks that this part of its state is split over."""
        return [(p, shard if state in sharded else 1) for part, _, shard in split for p in part.params]

    parameters = FP32 * sum(p.part(over) for p, over in divided("parameters"))
    gradients = FP32 * sum(p.part(over) for p, over in divided("gradients") if p.trained)
    optimizer = sum(optimizer_bytes(p, spec.optim, over) for p, over in divided("optimizer") if p.trained)
    host = disk = 0
    updated = FP32 * sum(p.part(over) for p, over in divided("optimizer") if p.trained)
    if spec.offload.optimizer == "nvme":
        buffers = int(min(_SWAP_BUFFERS * spec.offload.chunk_mb * 2**20, optimizer))
        disk, optimizer = optimizer, buffers
    if machine.device == "cuda":  # on a CPU the host's memory is the device's
        if spec.offload.parameters == "cpu" and "parameters" in sharded:
            host, parameters, gradients, optimizer = parameters + gradients + optimizer, 0, 0, 0
        elif spec.offload.optimizer != "none":
            # The host computes the update, so weights and gradients are there, too: all of them, or a few chunks.
            host, optimizer = optimizer + min(2 * updated, optimizer), 0
    exchanged = spec.batches(machine.ranks)[1] * sum(passes.exchanged for _, passes in stages)
    tensor_sent = sum(tensor_traffic(strategy, spec, machine, model, passes) for model, passes in stages)
    network = sum(replicas_network(strategy, spec, machine, model) for model, _ in stages)
    network += tensor_sent * group_share(spec, machine) + exchanged * experts_share(spec, machine)
    return Estimate(
        strategy=strategy,
        shard=shard,
        phase=moment.phase,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        buffers=max(model.buffers for model, _ in stages),
        gathered=moment.gathered,
        in_flight=moment.in_flight,
        activations=moment.activations,
        loss=moment.loss,
        host=host,
        disk=disk,
        copy=sum(_copy(strategy, spec, machine, model) for model, _ in stages),
        exchanged=exchanged,
        sent=sum(sum(astuple(traffic(strategy, spec, machine, model))) for model, _ in stages),
        tensor_sent=tensor_sent,
        network=round(network),
    )


def _moments(
    strategy: str, spec: JobSpec, machine: Machine, model: Model, activations: Activations
) -> tuple[list[Moment], int]:
    """(moments of the passes of one micro-batch, bytes of buffers that are allocated for the whole run)."""
    plan, peaks, shard = plan_of(strategy), activations.peaks, shard_of(strategy, spec, machine)
    kept = _compression(plan, spec, machine, model, shard) + _outer(plan, spec, machine, model, shard)
    if "parameters" in plan.sharded and replicas(spec, machine) > 1 and plan.in_flight is None:
        moments, waiting = _fully_sharded(strategy, spec, machine, model, peaks)
        return moments, waiting + kept
    own = plan.in_flight
    waiting = own(spec, machine, model) if own else _replicated_in_flight(plan, spec, machine, model)
    return [Moment(p.phase, p.whole, 0, p.activations, p.loss) for p in peaks], waiting + kept


def _copy(strategy: str, spec: JobSpec, machine: Machine, model: Model) -> int:
    """One rank's share of the state: its rows where parameters are sharded, else an equal part of the whole."""
    if spec.snapshot_every is None:
        return 0
    made, sharded = 0, "parameters" in plan_of(strategy).sharded
    for part, ranks, shard in parts_of(strategy, spec, machine, model):
        over = shard if sharded else ranks
        optimizer = sum(optimizer_bytes(p, spec.optim) for p in part.params if p.trained)
        weights = part.size(trained=spec.model.lora is not None)  # frozen ones beside adapters are in no copy
        made += -(-(FP32 * weights + part.buffers + optimizer) // over)
        if spec.comm.every is not None:  # of each replica its own, beside outer weights and momentum by rows
            trained = part.size(trained=True)
            made += (FP32 * trained + optimizer) // (over if sharded else 1) + FP32 * trained // over
            made += outer_sent(spec, trained // (over if sharded else 1)) if spec.comm.delay else 0
    return made


def optimizer_bytes(param: Param, optim: OptimSpec, ranks: int = 1) -> int:
    """State of one parameter on the rank that has most of it. An own optimizer without a PLAN counts as AdamW."""
    plan = optimizer_plan(optim.name) or optimizer_plan("adamw")
    assert plan is not None
    return plan.state_bytes(param.name, tuple(param.rows(ranks)), optim)


def _replicated_in_flight(plan: StrategyPlan, spec: JobSpec, machine: Machine, model: Model) -> int:
    """Buffers of a strategy that keeps parameters whole; they are kept for the whole run."""
    apart = model.by_replicas(replicas(spec, machine))
    return sum(_replicated_part(plan, spec, machine, part, over) for part, over in apart)


def _replicated_part(plan: StrategyPlan, spec: JobSpec, machine: Machine, model: Model, ranks: int) -> int:
    if ranks == 1:
        return 0
    reduce = BYTES[spec.precision.reduce]
    if not plan.sharded:
        trained = model.size(trained=True)
        # Buckets are the gradients themselves. But micro-batches without a sum accumulate in extra memory, until the last one.
        beside = FP32 * trained if spec.batches(machine.ranks)[1] > 1 else 0
        if reduce == FP32:
            return beside
        bucket = ddp_bucket(spec) / FP32
        return beside + int(reduce * min(max(bucket, *(p.part(1) for p in model.params)), trained))
    largest = max(units(model, ranks, trained=True).values(), default=0)
    slots = _IN_FLIGHT * (ranks + 1) * largest
    arriving = _IN_FLIGHT * ranks * largest if _direct(machine) else 0
    return slots * (FP32 if reduce == FP32 else reduce + FP32) + arriving * reduce


def _direct(machine: Machine) -> bool:
    """Whether received parts of a sum need buffers beside the sent ones: with gloo (raydist/worker/comm/gloo_p2p.py)."""
    return machine.device == "cpu"


def _stays_gathered(strategy: str, spec: JobSpec, machine: Machine, model: Model) -> int:
    """Bytes of parameters that stay gathered from a forward pass to the next backward pass."""
    plan = plan_of(strategy)
    if "parameters" not in plan.sharded or replicas(spec, machine) == 1 or plan.in_flight is not None:
        return 0
    stays = 0
    for part, _, over in parts_of(strategy, spec, machine, model):
        each, parts = BYTES[spec.precision.params] * over, units(part, over)
        root = each * parts.pop(ROOT, 0)
        blocks = [each * parts[i] for i in sorted(parts)]
        kept = {True: 0, False: sum(blocks), "auto": (blocks or [0])[-1]}
        stays += root + kept[spec.parallel.reshard_after_forward]
    return stays


def _fully_sharded(
    strategy: str, spec: JobSpec, machine: Machine, model: Model, peaks: Sequence[Peak]
) -> tuple[list[Moment], int]:
    """`_moments` under FSDP2: blocks are gathered and freed; parameters of no block stay gathered.

    A collective has its own flat buffer, besides the tensors used for computation.
    """
    moments, buffers = list[Moment](), 0
    for part, _, over in parts_of(strategy, spec, machine, model):
        of_part, of_all = _fully_sharded_part(spec, machine, part, over, peaks)
        buffers += of_all
        both = zip(moments, of_part, strict=True)
        moments = [
            replace(a, gathered=a.gathered + b.gathered, in_flight=a.in_flight + b.in_flight) for a, b in both
        ] if moments else of_part  # fmt: skip
    return moments, buffers


def _fully_sharded_part(
    spec: JobSpec, machine: Machine, model: Model, shard: int, peaks: Sequence[Peak]
) -> tuple[list[Moment], int]:
    compute, reduce = BYTES[spec.precision.params], BYTES[spec.precision.reduce]
    ahead, reshard = spec.parallel.prefetch, spec.parallel.reshard_after_forward
    parts, sums = units(model, shard), units(model, shard, trained=True)
    root = compute * shard * parts.pop(ROOT, 0)
    sums_root = sums.pop(ROOT, 0)
    blocks = [compute * shard * parts[i] for i in sorted(parts)]
    block, last, every = max(blocks, default=0), (blocks or [0])[-1], sum(blocks)
    sums_block = max(sums.values(), default=0)
    kept = {True: 0, False: every, "auto": last}[reshard]
    at_work = every if reshard is False else block

    # A shard's sum comes out of the reduce-scatter in its format; added to the gradient in fp32.
    def reducing(part: int) -> int:
        return reduce * shard * part + (FP32 if reduce == FP32 else FP32 + reduce) * part

    # FSDP2 frees what it has gathered last when it gathers the next in forward, or the pass ends; and what it has scattered last
    # when it scatters the next, or the step ends.
    scattered = reduce * shard * (sums_root or sums_block) if spec.batches(machine.ranks)[1] > 1 else 0
    reduced = max(reducing(sums_block), scattered)
    held = {
        "forward": (root + at_work, min(1 + ahead, len(blocks)) * block + scattered),
        "loss": (root + kept, (last or root) + scattered),
        "backward": (root + at_work, (0 if reshard is False else max(ahead, 1) * block) + reduced),
    }
    moments = [Moment(p.phase, p.whole + held[p.phase][0], held[p.phase][1], p.activations, p.loss) for p in peaks]
    moments.append(Moment("start", root + at_work, root + block, 0, 0))
    whole_gradients = compute * shard * sums_root
    moments.append(Moment("end", root + whole_gradients, reducing(sums_root), 0, 0))
    # Allocated from the first backward pass on.
    return moments, reduce * shard * max(sums_block, sums_root) if _direct(machine) else 0


def _compression(plan: StrategyPlan, spec: JobSpec, machine: Machine, model: Model, shard: int) -> int:
    """Bytes that compression keeps: of each gradient that a rank sends what is left, before and after a step, and encoded ones. And
    of the largest piece the decoded sum, and this rank's row of it. Two ranks have no such row."""
    ranks = replicas(spec, machine)
    if not spec.comm.compresses or ranks == 1 or not plan.compresses:
        return 0
    copies = "parameters" in plan.sharded and shard < ranks
    over = shard if copies else 1
    whole = plan.bucketed or copies  # an all-reduce
    # All but an all-reduce of two ranks sum up one row; an all-reduce encodes it again.
    row = 0.0 if whole and ranks == 2 * over else over / ranks
    numbers = sum(p.part(over) for p in model.params if p.trained)
    parts = units(model, over, trained=True)
    piece = max(parts.values(), default=0)
    if plan.bucketed:
        piece = min(numbers, max(piece, int(ddp_bucket(spec) / FP32)))
    each = (3 if whole and row else 2) * sent_bytes(spec, model.shapes(over)) + (2 * FP32 if spec.comm.feedback else 0)
    return round(each * numbers + FP32 * piece * (whole + row + (not spec.comm.feedback)))


def _outer(plan: StrategyPlan, spec: JobSpec, machine: Machine, model: Model, shard: int) -> int:
    """Bytes that outer steps keep: outer weights and momentum, before and after a step, by rows; where they are rounded, the
    outer weights of all rows. And the buffers of a fragment: what is sent, what arrives, and the result in fp32."""
    if spec.comm.every is None:
        return 0
    whole = "parameters" not in plan.sharded
    numbers = sum(p.part(1 if whole else shard) for p in model.params if p.trained)
    apart = max(replicas(spec, machine) // (1 if whole else shard), 1)
    outer = FP32 * (numbers if spec.comm.rounds else numbers // apart)
    return outer + 2 * FP32 * numbers // apart + 2 * outer_sent(spec, numbers) + FP32 * numbers // spec.comm.fragments
