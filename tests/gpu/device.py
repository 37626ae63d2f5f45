"""Shared by the tests of this folder: the device, and the smallest training on it. Its import skips where there is no CUDA
device.

RAYDIST_GPU_TESTS=cpu runs the tests that make sense there on the CPU, for developers without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raydist.data.batches import MicroBatch, equal_parts
from raydist.spec import JobSpec
from raydist.worker import build, model_transforms
from raydist.worker.distributed import Rank
from raydist.worker.forward_seeds import ForwardSeeds
from raydist.worker.mesh import Mesh
from raydist.worker.parameter_table import gather_parameters
from raydist.worker.precision import Precision
from raydist.worker.step import StepReport, TrainStep, loss_sum
from raydist.worker.step_hooks import BeforeUpdate

DEVICE = torch.device(os.environ.get("RAYDIST_GPU_TESTS", "cuda"))
CUDA = DEVICE.type == "cuda"
if CUDA and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: see CONTRIBUTING", allow_module_level=True)
if CUDA:
    DEVICE = torch.device("cuda", 0)

cuda_only = pytest.mark.skipif(not CUDA, reason="needs a CUDA device: see CONTRIBUTING")

VOCAB, CONTEXT, STEPS = 256, 64 if CUDA else 16, 5
MODEL = {"layers": 3, "width": 128, "heads": 2, "context": CONTEXT}


def job(**sections: Any) -> JobSpec:
    """The smallest valid spec, with these sections; 2 micro-batches of 4."""
    train = {"steps": STEPS, "global_batch": 8, "micro_batch": 4, **sections.pop("train", {})}
    model = {**MODEL, **sections.pop("model", {})}
    plain = {"data": {"source": "any"}, "train": train, "model": model, "optim": {"lr": 1e-3, "eps": 1e-6}}
    return JobSpec.model_validate(plain | sections)


def alone(device: torch.device = DEVICE) -> Rank:
    """One rank without a process group."""
    return Rank(0, 1, 0, device, "nccl" if device.type == "cuda" else "gloo", "127.0.0.1", None, ())


class Trainer:
    """Model, strategy, optimizer and step of one rank, with the same weights and samples each time. `rank`: one of several, of a
    job with virtual ranks."""

    def __init__(self, spec: JobSpec, device: torch.device = DEVICE, rank: Rank | None = None) -> None:
        self.rank, self.spec = rank or alone(device), spec
        mesh = self.mesh = Mesh.of(spec, self.rank)
        self.precision = Precision(spec.precision, device)
        self.strategy = build.build_strategy(spec, mesh)
        parts = build.divide_into_parts(spec, mesh, self.strategy)
        self.model: nn.Module = build.build_model(spec, VOCAB)
        text = torch.randint(VOCAB, (spec.train.global_batch, CONTEXT + 1), generator=torch.Generator().manual_seed(5))
        divide = equal_parts(spec.train.micro_batch)
        if parts is not None:
            divide = parts.divide(divide)
        self.batches = [
            MicroBatch(text[ids, :-1].contiguous().to(device), text[ids, 1:].contiguous().to(device), first=int(ids[0]))
            for ids in divide(np.arange(len(text)), mesh.data_rank, mesh.data_size)
        ]
        self.strategy.wrap(self.model, self.loss)
        model_transforms.prepare(self.model, spec.train)
        self.shards = self.strategy.shards()
        self.optimizer = build.build_optimizer(spec, self.rank, self.strategy, self.shards)
        self.before_update: Callable[[], None] = lambda: None
        self.step = TrainStep(
            mesh,
            self.strategy,
            self.optimizer,
            self.precision,
            parameters=gather_parameters(self.strategy.shards(), self.rank),
            full_tokens=spec.train.global_batch * CONTEXT,
            clip=spec.optim.clip,
            hooks=[
                ForwardSeeds([self.model], spec.train.seed, device, by_block=spec.train.compile is not True),
                BeforeUpdate(lambda: self.before_update()),
            ],
            parts=parts,
        )

    def loss(self, module: nn.Module, samples: int = 1) -> torch.Tensor:
        """The loss of the first samples."""
        first = self.batches[0]
        with self.precision.autocast():
            return loss_sum(module, MicroBatch(first.tokens[:samples], first.targets[:samples]))

    def __call__(self, steps: int = STEPS) -> list[StepReport]:
        """This many steps on the same samples."""
        tokens = sum(b.targets.numel() for b in self.batches)
        return [self.step(n, self.batches, tokens, 1e-3, want_stop=False) for n in range(1, steps + 1)]

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies on the CPU."""
        return {name: p.detach().cpu().clone() for name, p in self.model.named_parameters()}


def trained(spec: JobSpec, device: torch.device = DEVICE) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(losses, weights) of STEPS steps."""
    trainer = Trainer(spec, device)
    try:
        return [report.loss for report in trainer()], trainer.weights()
    finally:
        if hasattr(trainer.optimizer, "close"):
            trainer.optimizer.close()
