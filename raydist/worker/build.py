"""Builds the model and the optimizer from the spec.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from raydist import registry
from raydist.errors import GraphMismatch, UserError
from raydist.extension_plans import buckets, strategy_plan
from raydist.run.directory import RunDir
from raydist.spec import JobSpec
from raydist.worker import distributed, lora, parallel, pretrained
from raydist.worker.checks.replicas import hashes
from raydist.worker.comm import topology
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.distributed import Rank
from raydist.worker.mesh import Mesh
from raydist.worker.metrics import flops
from raydist.worker.optim import optimizers
from raydist.worker.optim.offload import adamw as offload
from raydist.worker.parallel import Example, ParallelStrategy, ParamShard
from raydist.worker.parallel._expert import ExpertParallel
from raydist.worker.parallel._model_graph import initialise, some
from raydist.worker.parallel._pipeline import Pipeline
from raydist.worker.parallel._split import LayerSplit
from raydist.worker.parallel._stages import StageCut
from raydist.worker.parts import Parts
from raydist.worker.pipeline_schedule import schedule

T = TypeVar("T")


def build_model(spec: JobSpec, vocab_size: int, meta: bool = False) -> nn.Module:
    """The model, from the same seed on every rank, with its weights on the CPU.

    `meta`: the strategy creates weights block by block. It gets a model without weights if the model's `build` sets `takes_meta`,
    otherwise the whole model: no other `build` is called under the meta device. Raises UserError if the model breaks the contract
    of models, and any error of `build`.
    """
    name, vocab_size = spec.model.name, spec.model.rows(vocab_size)
    build = registry.load("model", name)
    distributed.seed_all(spec.train.seed, "init")
    if getattr(build, "takes_meta", False):
        with torch.device("meta"):
            model = _module(build(spec.model, vocab_size), name)
        if not hasattr(model, "init_module"):
            raise UserError(
                f"model.name: {name}: takes_meta is set, and {type(model).__name__} has no init_module to make weights with",
                "add init_module(name, module), or take takes_meta away (docs/reference/models.md)",
            )
        if spec.model.hf is not None or spec.init_from is not None:
            pretrained.leave_empty(model)
        if spec.model.lora is not None:
            lora.add(model, spec.model.lora)
        distributed.seed_all(spec.train.seed, "init")  # weights must not depend on the numbers that build has drawn
        if not meta:
            for _ in initialise(model):
                pass
    else:
        model = _module(build(spec.model, vocab_size), name)
        empty = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
        if empty:
            raise UserError(
                f"model.name: {name}: no values for {some(empty)}: they are on the meta device",
                "give them values in build, or set takes_meta and give them values in init_module (docs/reference/models.md)",
            )
    return model


def _module(made: object, name: str) -> nn.Module:
    if not isinstance(made, nn.Module):
        raise UserError(
            f"model.name: {name}: gave {type(made).__name__}, not a torch.nn.Module",
            "name a function of (model, vocab_size) that returns the model, or the model's class (docs/extending.md)",
        )
    return made


def make_trainable(model: nn.Module) -> str | None:
    """Makes parameters contiguous, and converts fp16 and bf16 ones, as in published checkpoints, to fp32, which changes no value.

    Returns a note for the user if it converted any, else None.
    """
    converted = 0
    for p in model.parameters():
        if p.dtype in (torch.float16, torch.bfloat16):
            p.data = p.data.float()
            converted += 1
        if not p.is_contiguous():
            p.data = p.data.contiguous()
    if not converted:
        return None
    return f"{converted} parameters were built in 16 bits; they are stored in fp32, and `precision` sets the format of the compute"


def check_same(model: nn.Module, rank: Rank) -> None:
    """Raises GraphMismatch, on every rank, if a rank built other values than rank 0. The error names ranks and parameters.

    Nothing else detects this: ddp would train the values of rank 0, the other strategies a mixture of all. Call it before anything
    is split.
    """
    if rank.world_size == 1:
        return
    tensors = {n: t for n, t in (*model.named_parameters(), *model.named_buffers()) if not t.is_meta}
    local = dict(zip(tensors, hashes(tensors.values()), strict=True))
    if len(set(gather_json(hash(tuple(local.values())), rank.control))) == 1:  # one number per rank in the usual case
        return
    every = gather_json(local, rank.control)
    odd = [r for r, theirs in enumerate(every) if theirs != every[0]]
    names = [n for n, value in every[odd[0]].items() if every[0].get(n) != value]
    names += every[0].keys() - every[odd[0]].keys()
    which = f"rank{'s' if len(odd) > 1 else ''} {some([str(r) for r in odd])}"
    raise GraphMismatch(
        f"{which} built other first values than rank 0: {some(names)}",
        "build the same on every rank: load the same file, or draw from the default generator of torch, numpy or random, which are "
        "seeded the same on all ranks",
    )


def settled(
    spec: JobSpec,
    rank: Rank,
    run: RunDir,
    vocab_size: int,
    example: Example,
    say: Callable[[str], None],
    tell: Callable[..., None],
) -> JobSpec:
    """The spec, with what was measured in place of `parallel.bucket_mb: auto`, `comm.ring: null`, and auto in `comm`; `say` gets
    the reasons, `tell` the event of the latter. Every rank. Trials change no state."""
    spec = topology.settle(spec, rank, run, say)
    build = partial(build_model, spec, vocab_size)
    spec = _with_buckets(spec, rank, run, vocab_size, build, example, say)
    if not spec.comm.auto:
        return spec
    from raydist.worker.comm import auto

    spec, chosen = auto.settle(spec, rank, run, build, example)
    if chosen is not None:
        tell("comm_chosen", **chosen.way, because=chosen.because, seconds=chosen.seconds)
    return spec


def _with_buckets(
    spec: JobSpec,
    rank: Rank,
    run: RunDir,
    vocab_size: int,
    build: Callable[[], nn.Module],
    example: Example,
    say: Callable[[str], None],
) -> JobSpec:
    parallel = spec.parallel
    if parallel.bucket_mb != "auto" or not buckets(parallel.strategy) or rank.world_size == 1 or spec.comm.every:
        return spec
    from raydist.worker.comm.buckets import choose

    if why := choose.untried(spec):
        say(f"parallel.bucket_mb: auto: {why}")
        return spec
    chosen = choose.settle(spec, rank, run, vocab_size, build, example)
    say(f"parallel.bucket_mb: auto: {chosen.because}")
    return spec.with_fields({"parallel.bucket_mb": chosen.bucket_mb})


def replica(spec: JobSpec, mesh: Mesh) -> Mesh | None:
    """The mesh of this rank's replica, of those that train apart; None without `comm.every`. A collective.

    A replica has the ranks that hold one copy of the state together. Raises UserError if their number does not divide all.
    """
    if spec.comm.every is None:
        return None
    plan, ranks = strategy_plan(spec.parallel.strategy), mesh.data_size
    together = plan.group(spec, ranks, mesh.within_nodes()) if plan is not None and plan.group is not None else 1
    if ranks % together:
        raise UserError(
            f"parallel.shard: {together} does not divide the {ranks} replicas of the model",
            "set it to a divisor, such as the GPUs of a node",
        )
    return mesh.apart(ranks // together)


def build_strategy(spec: JobSpec, mesh: Mesh) -> ParallelStrategy:
    """The strategy that the job names; in a pipeline one for each stage of this rank, with experts on several ranks two."""

    mesh = mesh.of_state

    def make(spec: JobSpec, mesh: Mesh) -> ParallelStrategy:
        return parallel.build(spec, mesh) if mesh.expert == 1 else ExpertParallel(spec, mesh, parallel.build)

    if mesh.pipeline == 1:
        return make(spec, mesh)
    return Pipeline(spec, mesh, make)


def refuse_running_statistics(model: nn.Module) -> None:
    """Raises UserError for a layer whose buffers depend on which samples this rank has seen, with `train.virtual_ranks`."""
    for name, module in model.named_modules():
        if getattr(module, "track_running_stats", False):
            raise UserError(
                f"train.virtual_ranks: {name}: {type(module).__name__} has statistics of the samples of this rank, which depend on "
                "the number of workers",
                "set track_running_stats=False, or take another norm",
            )


def divide_into_parts(spec: JobSpec, mesh: Mesh, strategy: ParallelStrategy) -> Parts | None:
    """Tells a strategy, before it wraps the model, of the parts that `train.virtual_ranks` makes. Every rank."""
    if spec.train.virtual_ranks is None:
        return None
    axis = mesh.of_state
    parts = Parts(
        spec.train.virtual_ranks,
        axis.data_rank,
        axis.data_size,
        strategy.reduces_together(),
        replicas=mesh.data_size,
        unit=spec.parallel.replicas_with_experts,
    )
    strategy.parts = parts
    return parts


def pipeline_schedule(spec: JobSpec, mesh: Mesh, cuts: StageCut) -> dict[str, Any]:
    """See `raydist.worker.pipeline_schedule.schedule`, of the replica with the most sequences."""
    most = -(-spec.train.global_batch // mesh.data_size)
    again = spec.train.checkpoint_activations == "full"
    return schedule(cuts.blocks, cuts.shares, mesh.pipeline, most, spec.train.micro_batch, again)


def build_optimizer(
    spec: JobSpec,
    rank: Rank,
    strategy: ParallelStrategy,
    shards: Mapping[str, ParamShard],
    split: LayerSplit | None = None,
) -> torch.optim.Optimizer:
    """The optimizer, with its state on the device of the shards, in host memory, or in a file. Raises UserError without shards."""
    if not shards:
        raise UserError(
            f"rank {rank.rank} has no parameter that is trained",
            "give the layers of each pipeline stage an adapter (model.lora.targets), or set parallel.pipeline: 1",
        )
    device = next(iter(shards.values())).local.device
    same_bits = spec.train.virtual_ranks is not None
    if spec.offload.optimizer == "none":
        return optimizers.build(shards, spec.optim, device, same_bits=same_bits)
    made = offload.build(shards, spec.optim, spec.offload, device, tag=f"rank{rank.rank}")
    made.same_bits = same_bits
    strategy.on_final = made.gradients_final if split is None else split.final(made.gradients_final)
    if rank.world_size == 1:
        made.watch_backward()
    return made


def capacity(spec: JobSpec, rank: Rank, model: nn.Module) -> dict[str, float] | None:
    """For the displayed MFU: `flops_per_token`, and `peak_flops` of all devices together; None if a device's peak is not known."""
    if rank.device.type != "cuda":
        return None
    peak = flops.peak_flops(torch.cuda.get_device_name(rank.device))
    if peak is None:
        return None
    return {
        "flops_per_token": flops.flops_per_token(model, spec.model.context),
        "peak_flops": peak * rank.world_size,
    }
