"""The model and its optimizer, as the spec asks for them.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import torch
from torch import nn

from raydist import registry
from raydist.rundir import RunDir
from raydist.spec import JobSpec
from raydist.worker import flops, offload, optim, setup
from raydist.worker.parallel import Example, ParallelStrategy, ParamShard
from raydist.worker.setup import Rank


def build_model(spec: JobSpec, vocab_size: int, meta: bool = False) -> nn.Module:
    """The model, the same on every rank, from the same seed; without weights, which wrapping it will make, if the strategy (`meta`)
    and the model can do so.
    """
    build = registry.load("model", spec.model.name)
    if meta:
        with torch.device("meta"):
            model = build(spec.model, vocab_size)
        if hasattr(model, "init_module"):
            setup.seed_all(spec.train.seed, "init")
            return cast(nn.Module, model)
    setup.seed_all(spec.train.seed, "init")
    return cast(nn.Module, build(spec.model, vocab_size))


def settled(
    spec: JobSpec, rank: Rank, run: RunDir, vocab_size: int, example: Example, say: Callable[[str], None]
) -> JobSpec:
    """The spec, with a size in place of `parallel.bucket_mb: auto`; `say` is told why. Every rank; trials leave no trace."""
    parallel = spec.parallel
    if parallel.bucket_mb != "auto" or parallel.strategy != "ddp" or rank.world_size == 1:
        return spec
    from raydist.worker.buckets import choose

    chosen = choose.settle(spec, rank, run, vocab_size, partial(build_model, spec, vocab_size), example)
    say(f"parallel.bucket_mb: auto: {chosen.because}")
    return spec.model_copy(update={"parallel": parallel.model_copy(update={"bucket_mb": chosen.bucket_mb})})


def build_optimizer(
    spec: JobSpec, rank: Rank, strategy: ParallelStrategy, shards: Mapping[str, ParamShard]
) -> torch.optim.Optimizer:
    """Where the shards are, or with its state in host memory or in a file."""
    device = next(iter(shards.values())).local.device
    if spec.offload.optimizer == "none":
        return optim.build(shards, spec.optim, device)
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
