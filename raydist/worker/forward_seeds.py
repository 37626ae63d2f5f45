"""Seeds the random numbers of forward passes (dropout) by what is computed, not by which rank computes it, or when.

Runs in: each train worker. Torch, never ray.

    before the model      numpy, random and torch, from (train.seed, step, first sample of the micro-batch)
    before each block     torch, from the same and the block's name

So a micro-batch gets the same masks on every mesh, whichever pipeline stage has the block, and whatever was computed before: in a
resumed run, in a step that is computed again, after a step that was left out. No random state belongs to a checkpoint.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from raydist.worker.distributed import derive
from raydist.worker.parallel._model_graph import elements_of
from raydist.worker.step_hooks import Step, StepHook


class ForwardSeeds(StepHook):
    """A hook of every step, and of the modules that are called. `parts`: the model, or the stages that this rank has of it.

    Call it after the strategy has wrapped the model. `by_block`: False if the model is compiled as a whole, into which no seed can
    be set; a block then continues the random numbers of the one before.
    """

    def __init__(self, parts: Sequence[nn.Module], seed: int, device: torch.device, *, by_block: bool = True) -> None:
        self._seed, self._at = seed, (0, 0)
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index])
        self._seeded: set[str] = set()
        for part in parts:
            part.register_forward_pre_hook(self._before_model)
            blocks = elements_of(part, nn.ModuleList) or elements_of(part, nn.Sequential)
            for name, block in blocks if by_block else ():
                block.register_forward_pre_hook(partial(self._before_block, name))

    def before_forward(self, step: Step, index: int) -> None:
        """See `StepHook.before_forward`."""
        self._at = step.number, step.micro_batches[index].first

    def _before_model(self, module: nn.Module, args: Any) -> None:
        if module.training:
            self._seeded.clear()
            value = self._seed_torch("")
            random.seed(value)
            np.random.seed(value % 2**32)  # the global generator, because users' models draw from it

    def _before_block(self, name: str, module: nn.Module, args: Any) -> None:
        # A block that is called several times in a pass draws other numbers each time.
        if module.training and name not in self._seeded:
            self._seeded.add(name)
            self._seed_torch(name)

    def _seed_torch(self, name: str) -> int:
        value = derive(self._seed, f"forward {name}", *self._at)
        for generator in self._generators:
            generator.manual_seed(value)
        return value
