"""The model and its optimizer, as the spec asks for them.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from raydist import registry
from raydist.errors import GraphMismatch, UserError
from raydist.run.directory import RunDir
from raydist.spec import JobSpec
from raydist.worker import distributed
from raydist.worker.checks.replicas import hashes
from raydist.worker.distributed import Rank
from raydist.worker.metrics import flops
from raydist.worker.optim import optimizers
from raydist.worker.optim.offload import adamw as offload
from raydist.worker.parallel import Example, ParallelStrategy, ParamShard
from raydist.worker.parallel._model_graph import initialise, some

T = TypeVar("T")


def build_model(spec: JobSpec, vocab_size: int, meta: bool = False) -> nn.Module:
    """The model, from the same seed on every rank, its weights on the CPU.

    `meta`: the strategy makes weights block by block. It gets a model without any if the model's `build` says `takes_meta`, and the
    whole one else: no other `build` is ever called under the meta device. Raises UserError for what breaks the models' contract,
    and what `build` raises.
    """
    name = spec.model.name
    build = registry.load("model", name)
    distributed.seed_all(spec.train.seed, "init")
    if getattr(build, "takes_meta", False):
        with torch.device("meta"):
            model = _module(build(spec.model, vocab_size), name)
        if not hasattr(model, "init_module"):
            raise UserError(
                f"model.name: {name}: takes_meta is set, and {type(model).__name__} has no init_module to make weights with",
                "add init_module(name, module), or take takes_meta away (docs/models.md)",
            )
        distributed.seed_all(spec.train.seed, "init")  # what build has drawn, weights are not to depend on
        if not meta:
            for _ in initialise(model):
                pass
    else:
        model = _module(build(spec.model, vocab_size), name)
        empty = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
        if empty:
            raise UserError(
                f"model.name: {name}: no values for {some(empty)}: they are on the meta device",
                "have build give them values; one that leaves that to init_module sets takes_meta (docs/models.md)",
            )
    return model


def _module(made: object, name: str) -> nn.Module:
    if not isinstance(made, nn.Module):
        raise UserError(
            f"model.name: {name}: gave {type(made).__name__}, not a torch.nn.Module",
            "name a function of (model, vocab_size) that returns the model, or its class (docs/extending.md)",
        )
    return made


def make_trainable(model: nn.Module) -> str | None:
    """Makes parameters contiguous, and those in fp16 or bf16, as published checkpoints have them, fp32, which changes no value.

    A note for the user on the latter, or None.
    """
    few = 0
    for p in model.parameters():
        if p.dtype in (torch.float16, torch.bfloat16):
            p.data = p.data.float()
            few += 1
        if not p.is_contiguous():
            p.data = p.data.contiguous()
    if not few:
        return None
    return f"{few} parameters were built in 16 bits; they are kept in fp32, and computed with as precision says"


def check_same(model: nn.Module, rank: Rank) -> None:
    """Raises GraphMismatch, on every rank, if a rank has built other values than rank 0: it names ranks and parameters.

    Nothing else would tell: ddp would train rank 0's, and the other strategies a mixture of all. Call it before anything is split.
    """
    if rank.world_size == 1:
        return
    tensors = {n: t for n, t in (*model.named_parameters(), *model.named_buffers()) if not t.is_meta}
    mine = dict(zip(tensors, hashes(tensors.values()), strict=True))
    if len(set(_every(hash(tuple(mine.values())), rank))) == 1:  # one number a rank, while nothing is wrong
        return
    every = _every(mine, rank)
    odd = [r for r, theirs in enumerate(every) if theirs != every[0]]
    names = [n for n, value in every[odd[0]].items() if every[0].get(n) != value]
    names += every[0].keys() - every[odd[0]].keys()
    which = f"rank{'s' if len(odd) > 1 else ''} {some([str(r) for r in odd])}"
    raise GraphMismatch(
        f"{which} built other first values than rank 0: {some(names)}",
        "build the same on every rank: load the same file, or draw from torch's, numpy's or random's default generator, which are "
        "seeded the same on all ranks",
    )


def _every(mine: T, rank: Rank) -> list[T]:
    every: list[Any] = [mine] * rank.world_size
    dist.all_gather_object(every, mine, group=rank.control)
    return every


def settled(
    spec: JobSpec, rank: Rank, run: RunDir, vocab_size: int, example: Example, say: Callable[[str], None]
) -> JobSpec:
    """The spec, with a size in place of `parallel.bucket_mb: auto`; `say` is told why. Every rank; trials leave no trace."""
    parallel = spec.parallel
    if parallel.bucket_mb != "auto" or parallel.strategy != "ddp" or rank.world_size == 1:
        return spec
    from raydist.worker.comm.buckets import choose

    chosen = choose.settle(spec, rank, run, vocab_size, partial(build_model, spec, vocab_size), example)
    say(f"parallel.bucket_mb: auto: {chosen.because}")
    return spec.model_copy(update={"parallel": parallel.model_copy(update={"bucket_mb": chosen.bucket_mb})})


def build_optimizer(
    spec: JobSpec, rank: Rank, strategy: ParallelStrategy, shards: Mapping[str, ParamShard]
) -> torch.optim.Optimizer:
    """Where the shards are, or with its state in host memory or in a file."""
    device = next(iter(shards.values())).local.device
    if spec.offload.optimizer == "none":
        return optimizers.build(shards, spec.optim, device)
    made = offload.build(shards, spec.optim, spec.offload, device, tag=f"rank{rank.rank}")
    strategy.on_final = made.gradients_final
    if rank.world_size == 1:
        made.watch_backward()
    return made


def capacity(spec: JobSpec, rank: Rank, model: nn.Module) -> dict[str, float] | None:
    """For the display's MFU: `flops_per_token`, and the `peak_flops` of all devices; None where that of a device is not known."""
    if rank.device.type != "cuda":
        return None
    peak = flops.peak_flops(torch.cuda.get_device_name(rank.device))
    if peak is None:
        return None
    return {
        "flops_per_token": flops.flops_per_token(model, spec.model.context),
        "peak_flops": peak * rank.world_size,
    }
