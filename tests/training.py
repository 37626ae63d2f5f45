"""The smallest training that is a whole one: spec, samples, a rank's model, strategy, optimizer and step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from raydist import registry
from raydist.data.batches import MASKED, MicroBatch, share
from raydist.spec import JobSpec
from raydist.worker import model_transforms
from raydist.worker.distributed import Rank
from raydist.worker.optim import optimizers
from raydist.worker.optim.offload import adamw as offload
from raydist.worker.parallel import ParallelStrategy
from raydist.worker.precision import Precision
from raydist.worker.step import TrainStep, loss_sum

VOCAB, CONTEXT, STEPS = 13, 8, 5
MODEL = {"layers": 3, "width": 16, "heads": 2, "context": CONTEXT}


def job(strategy: str, model: dict[str, Any] = MODEL, train: Any = {}, **sections: Any) -> JobSpec:  # noqa: B006
    """A spec with these sections beside the smallest that is valid."""
    return JobSpec.model_validate(
        {
            "data": {"source": "any"},
            "train": {"steps": STEPS, **train},
            # With the usual eps AdamW divides tiny gradients by their own size, and makes rounding errors as large as updates.
            "optim": {"lr": 1e-2, "clip": 0.5, "eps": 1e-3},
            "model": model,
            "parallel": VARIANTS[strategy],
            "cluster": {"workers": 4},  # what hsdp is checked against
            **sections,
        }
    )


VARIANTS = {name: {"strategy": name} for name in registry.names("parallel")} | {
    "hsdp in pairs": {"strategy": "hsdp", "shard": 2},
    "zero3 keeping all": {"strategy": "zero3", "reshard_after_forward": False},
    "zero3 dropping all, no prefetch": {"strategy": "zero3", "reshard_after_forward": True, "prefetch": 0},
}
"""Every strategy by name, and what else of `parallel` changes the order of things."""


def samples(n: int, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens and targets [n, 8]; the last sample counts 3 tokens only."""
    g = torch.Generator().manual_seed(seed)
    text = torch.randint(0, VOCAB, (n, CONTEXT + 1), generator=g)
    tokens, targets = text[:, :-1].clone(), text[:, 1:].clone()
    targets[-1, 3:] = MASKED
    return tokens, targets


def mine(rank: Rank, tokens: torch.Tensor, targets: torch.Tensor, micro: int) -> list[MicroBatch]:
    """This rank's part, as the loader deals it."""
    made = []
    for ids in share(np.arange(len(tokens)), rank.rank, rank.world_size, micro):
        if len(ids):
            made.append(MicroBatch(tokens[ids], targets[ids]))
        else:
            made.append(MicroBatch(tokens[:1], torch.full_like(targets[:1], MASKED)))
    return made


def counted(batches: list[MicroBatch]) -> int:
    """How many tokens count in their loss."""
    return sum(int((m.targets != MASKED).sum()) for m in batches)


class Trainer:
    """Model, strategy, optimizer and step of one rank."""

    def __init__(self, rank: Rank, spec: JobSpec, full: int, model: nn.Module | None = None) -> None:
        self.rank, self.spec = rank, spec
        self.strategy: ParallelStrategy = registry.load("parallel", spec.parallel.strategy)(spec, rank)
        build = registry.load("model", spec.model.name)
        later = self.strategy.takes_meta and model is None and getattr(build, "takes_meta", False)
        if model is None:
            torch.manual_seed(1)
            with torch.device("meta") if later else nullcontext():
                model = build(spec.model, VOCAB)
        self.model: nn.Module = model
        tokens, targets = samples(1)
        self.precision = Precision(spec.precision, rank.device)

        def example(module: nn.Module) -> torch.Tensor:
            with self.precision.autocast():
                return loss_sum(module, MicroBatch(tokens, targets))

        self.strategy.wrap(self.model, example)
        model_transforms.prepare(self.model, spec.train)
        shards = self.strategy.shards()
        self.optimizer: torch.optim.Optimizer
        if spec.offload.optimizer == "none":
            self.optimizer = optimizers.build(shards, spec.optim, rank.device)
        else:
            self.optimizer = offload.build(shards, spec.optim, spec.offload, rank.device, tag=f"rank{rank.rank}")
            self.strategy.on_final = self.optimizer.gradients_final
        self.before_update: Callable[[], object] = lambda: None
        self.step = TrainStep(
            rank,
            self.strategy,
            self.optimizer,
            self.precision,
            full_tokens=full,
            clip=spec.optim.clip,
            before_update=lambda: self.before_update(),
        )

    def whole(self, grad: bool = False) -> dict[str, torch.Tensor]:
        """Every parameter, or its gradient, put together from all ranks."""
        found = {}
        for name, shard in self.strategy.shards().items():
            local = shard.local.grad if grad else shard.local.detach()
            assert local is not None
            tensor = shard.whole(local)
            found[name] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        return found


def alone() -> Rank:
    """One process without a group."""
    return Rank(0, 1, 0, torch.device("cpu"), "gloo", "127.0.0.1", None, ())


def run(ranks: Any, function: Any, world: int, *args: Any) -> list[Any]:
    """On real ranks, or here if it is one. Raises what a rank raised: the cause, not that the others lost it."""
    results = [function(alone(), *args)] if world == 1 else ranks.run(function, world, *args)
    raised = [result for result in results if isinstance(result, BaseException)]
    for error in sorted(raised, key=lambda error: "Connection closed by peer" in str(error)):
        raise error
    return results
