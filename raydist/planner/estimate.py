"""How many bytes a rank holds and sends, by strategy: what `raydist plan` adds up.

Runs anywhere. Plain python: no torch, no ray.

Weights, gradients and the update are fp32: 4 bytes a parameter, 4 of gradient, and the optimizer's own (AdamW: 8), each divided as
the strategy says (ZeRO, arXiv 1910.02054). What a forward and backward pass needs beside them is measured, not guessed
(measure.py), and comes in here as `Activations`. The rest follows from how worker/parallel/_zero.py, worker/parallel/_fsdp.py and
parallel/ddp.py work; tests/planner/test_plan.py compares with what real ranks hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING

from raydist.planner.facts import ROOT, Activations, Estimate, Machine, Model, Param, Pass, Peak, Traffic

if TYPE_CHECKING:
    from raydist.spec import JobSpec, OptimSpec

STRATEGIES = ("ddp", "zero1", "zero2", "hsdp", "zero3")
"""What can be planned, the least sent a step first: the order of preference."""

_STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "hsdp": 3}
_FP32 = 4
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_DDP_BUCKET_MB = 25.0  # torch's default
_IN_FLIGHT = 2  # zero1, zero2: units on their way at a time; worker/parallel/_zero.py's IN_FLIGHT
_SWAP_BUFFERS = 4  # nvme: chunks in memory; worker/optim/offload/moments.py's BUFFERS, and hostcopy.py's WINDOW


def batches(spec: JobSpec, ranks: int) -> tuple[int, int]:
    """(sequences of a micro-batch, micro-batches of a step) on the rank that has most: as data/batches.py shares them."""
    most = -(-spec.train.global_batch // ranks)
    count = -(-most // spec.train.micro_batch)
    return -(-most // count), count


def shard_of(strategy: str, spec: JobSpec, machine: Machine) -> int:
    """Ranks that share one copy of what the strategy shards."""
    if strategy == "ddp":
        return 1
    if strategy == "hsdp":
        return spec.parallel.shard or min(machine.per_node, machine.ranks)
    return machine.ranks


def refusal(strategy: str, spec: JobSpec, machine: Machine, model: Model) -> str | None:
    """Why raydist would not train this job under that strategy; None if it would."""
    if strategy == "ddp" or machine.ranks == 1:
        whole_only = spec.offload.parameters == "cpu" and strategy == "ddp"
    else:
        whole_only = spec.offload.parameters == "cpu" and strategy in ("zero1", "zero2")
        if spec.optim.name in ("adafactor", "muon"):
            return f"{spec.optim.name} works on whole matrices"
        if scalars := [p.name for p in model.params if not p.shape]:
            return f"{scalars[0]} has no dimension to split"
        if strategy == "hsdp" and machine.ranks % (shard := shard_of(strategy, spec, machine)):
            return f"groups of {shard} do not make {machine.ranks} ranks"
    return "offload.parameters needs them sharded" if whole_only else None


def measured_pass(strategy: str, spec: JobSpec, machine: Machine) -> Pass:
    """What has to be measured for a strategy."""
    sharded = machine.ranks > 1 and strategy in ("zero2", "zero3", "hsdp")
    cast = sharded and strategy != "zero2" and spec.precision.params != "fp32"
    return Pass(batches(spec, machine.ranks)[0], spec.train.checkpoint_activations, cast, hold=sharded)


def estimate(strategy: str, spec: JobSpec, machine: Machine, model: Model, activations: Activations) -> Estimate:
    """The fullest rank under `strategy`, one of STRATEGIES. `activations` are those of `measured_pass`."""
    assert strategy in STRATEGIES, strategy
    shard = shard_of(strategy, spec, machine)
    stage = _STAGES[strategy] if machine.ranks > 1 else 0
    over = [
        shard if stage >= needed else 1 for needed in (3, 2, 1)
    ]  # ranks that parameters, gradients, state are split over
    parameters = _FP32 * sum(p.part(over[0]) for p in model.params)
    gradients = _FP32 * sum(p.part(over[1]) for p in model.params if p.trained)
    optimizer = sum(optimizer_bytes(p, spec.optim, over[2]) for p in model.params if p.trained)
    host = disk = 0
    updated = _FP32 * sum(p.part(over[2]) for p in model.params if p.trained)
    if spec.offload.optimizer == "nvme":
        buffers = int(min(_SWAP_BUFFERS * spec.offload.chunk_mb * 2**20, optimizer))
        disk, optimizer = optimizer, buffers
    if machine.device == "cuda":  # on a CPU the host's memory is the device's
        if spec.offload.parameters == "cpu" and stage == 3:
            host, parameters, gradients, optimizer = parameters + gradients + optimizer, 0, 0, 0
        elif spec.offload.optimizer != "none":
            # The update is computed there: weights and gradients are there too, all of them or those of a few chunks.
            host, optimizer = optimizer + min(2 * updated, optimizer), 0
    if stage == 3:
        moments = _fully_sharded(spec, machine, model, shard, activations.peaks)
    else:
        waiting = _replicated_in_flight(stage, spec, machine, model)
        moments = [(p, p.whole, waiting) for p in activations.peaks]
    peak, gathered, in_flight = max(moments, key=lambda m: m[0].activations + m[0].loss + m[1] + m[2])
    return Estimate(
        strategy=strategy,
        shard=shard,
        phase=peak.phase,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        buffers=model.buffers,
        gathered=gathered,
        in_flight=in_flight,
        activations=peak.activations,
        loss=peak.loss,
        host=host,
        disk=disk,
        copy=_copy(stage, spec, machine, model, shard),
        sent=sum(astuple(traffic(strategy, spec, machine, model))),
    )


def _copy(stage: int, spec: JobSpec, machine: Machine, model: Model, shard: int) -> int:
    """One rank's share of the state: what is whole on every rank is cut into equal parts, what is sharded is what it holds."""
    if spec.snapshot_every is None:
        return 0
    optimizer = sum(optimizer_bytes(p, spec.optim) for p in model.params if p.trained)
    whole = _FP32 * model.size() + model.buffers + optimizer
    return -(-whole // (shard if stage == 3 else machine.ranks))


def optimizer_bytes(param: Param, optim: OptimSpec, ranks: int = 1) -> int:
    """State of one parameter on the rank that has most of it, fp32; adamw and adafactor count steps too, 4 bytes each."""
    shape = param.rows(ranks)
    size = math.prod(shape)
    match optim.name:
        case "sgd":
            return 4 * size if optim.momentum else 0
        case "adafactor" if len(shape) >= 2:
            return 4 * (math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1]) + 4
        case "adafactor":
            return 4 * size + 4
        case "muon" if len(shape) == 2 and "blocks" in param.name.split("."):
            return 4 * size
    return 8 * size + 4


def _units(model: Model, ranks: int, trained: bool = False) -> dict[int, int]:
    """Unit -> elements of one rank's part of it, padded to the largest rank's rows."""
    found: dict[int, int] = {}
    for p in model.params:
        if p.trained or not trained:
            found[p.unit] = found.get(p.unit, 0) + p.part(ranks)
    return found


def _replicated_in_flight(stage: int, spec: JobSpec, machine: Machine, model: Model) -> int:
    """Buffers of ddp, zero1 and zero2: kept for the whole run."""
    if machine.ranks == 1:
        return 0
    reduce = _BYTES[spec.precision.reduce]
    if stage == 0:
        trained = model.size(trained=True)
        # Buckets are the gradients themselves; but micro-batches without a sum add up beside them, until the last one.
        beside = _FP32 * trained if batches(spec, machine.ranks)[1] > 1 else 0
        if reduce == _FP32:
            return beside
        asked = spec.parallel.bucket_mb
        bucket = (_DDP_BUCKET_MB if asked is None or asked == "auto" else asked) * 2**20 / _FP32
        return beside + int(reduce * min(max(bucket, *(p.part(1) for p in model.params)), trained))
    largest = max(_units(model, machine.ranks, trained=True).values(), default=0)
    slots = _IN_FLIGHT * (machine.ranks + 1) * largest
    arriving = _IN_FLIGHT * machine.ranks * largest if _direct(machine) else 0
    return slots * (_FP32 if reduce == _FP32 else reduce + _FP32) + arriving * reduce


def _direct(machine: Machine) -> bool:
    """Whether the parts of a sum arrive beside what is sent: raydist/worker/parallel/_gloo_p2p.py, with gloo."""
    return machine.device == "cpu"


def _fully_sharded(
    spec: JobSpec, machine: Machine, model: Model, shard: int, peaks: Sequence[Peak]
) -> list[tuple[Peak, int, int]]:
    """(peak, gathered, in flight) of each phase under FSDP2: blocks come and go, what is of no block stays gathered.

    A collective has a flat buffer of its own, beside the tensors that are computed with.
    """
    compute, reduce = _BYTES[spec.precision.params], _BYTES[spec.precision.reduce]
    ahead, reshard = spec.parallel.prefetch, spec.parallel.reshard_after_forward
    parts, sums = _units(model, shard), _units(model, shard, trained=True)
    root = compute * shard * parts.pop(ROOT, 0)
    sums_root = sums.pop(ROOT, 0)
    blocks = [compute * shard * parts[i] for i in sorted(parts)]
    block, last, every = max(blocks, default=0), (blocks or [0])[-1], sum(blocks)
    sums_block = max(sums.values(), default=0)
    kept = {True: 0, False: every, "auto": last}[reshard]
    at_work = every if reshard is False else block

    # A shard's sum comes out of the reduce-scatter in its format; added to the gradient in fp32.
    def reducing(part: int) -> int:
        return reduce * shard * part + (_FP32 if reduce == _FP32 else _FP32 + reduce) * part

    # Kept from the first backward pass on.
    arriving = reduce * shard * max(sums_block, sums_root) if _direct(machine) else 0
    held = {
        "forward": (root + at_work, (1 + ahead) * block),
        "loss": (root + kept, 0),
        "backward": (root + at_work, (0 if reshard is False else max(ahead, 1) * block) + reducing(sums_block)),
    }
    moments = [(p, p.whole + held[p.phase][0], held[p.phase][1]) for p in peaks]
    moments.append((Peak("start", 0, 0, 0), root + at_work, root + block))
    whole_gradients = compute * shard * sums_root
    moments.append((Peak("end", 0, 0, 0), root + whole_gradients, reducing(sums_root)))
    return [(peak, gathered, sent + arriving) for peak, gathered, sent in moments]


def traffic(strategy: str, spec: JobSpec, machine: Machine, model: Model) -> Traffic:
    """Bytes that one rank sends in one step, by ring algorithms; the norm and the loss, a few bytes, left out."""
    ranks, count = machine.ranks, batches(spec, machine.ranks)[1]
    if ranks == 1:
        return Traffic(0, 0, 0)
    stage, shard = _STAGES[strategy], shard_of(strategy, spec, machine)
    compute, reduce = _BYTES[spec.precision.params], _BYTES[spec.precision.reduce]
    if stage == 0:
        return Traffic(0, round(2 * (ranks - 1) / ranks * model.size(trained=True) * reduce), 0)
    grads = sum(_units(model, shard, trained=True).values())
    if stage < 3:
        each = (ranks - 1) * grads
        return Traffic(each * _FP32, each * reduce * (count if stage == 2 else 1), 0)
    parts = _units(model, shard)
    once = parts.pop(ROOT, 0)
    blocks = [parts[i] for i in sorted(parts)]
    match spec.parallel.reshard_after_forward:
        case False:
            gathers = once + sum(blocks)
        case True:
            gathers = once + 2 * sum(blocks)
        case _:
            gathers = once + 2 * sum(blocks[:-1]) + sum(blocks[-1:])
    copies = ranks // shard
    across = 2 * (copies - 1) / copies * grads * reduce
    each = (shard - 1) * count
    return Traffic(each * gathers * compute, each * grads * reduce, round(across))
