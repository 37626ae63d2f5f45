"""Random numbers of forward passes: a function of seed, step, micro-batch and block alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raydist.data.batches import MicroBatch
from raydist.worker.forward_seeds import ForwardSeeds
from raydist.worker.step_hooks import Step


class Draws(nn.Module):
    """Adds random numbers before, in and after its blocks, the second of which is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Dropout(0.5) for _ in range(2))

    def forward(self, x: Tensor) -> list[Any]:
        first, second = self.blocks
        called = [first(x), second(x), second(x)]
        return [random.random(), float(np.random.random()), float(torch.rand(())), *(out.tolist() for out in called)]


def drawn(model: Draws, seeds: ForwardSeeds, step: int, first: int) -> list[Any]:
    seeds.before_forward(Step(step, [MicroBatch(None, None, first=first)]), 0)
    return model(torch.ones(64))


def test_what_was_drawn_before_does_not_count() -> None:
    """The same step and sample: the same numbers, whatever came between. Another step, sample or seed: others."""
    model = Draws()
    seeds = ForwardSeeds([model], 1, torch.device("cpu"))
    right = drawn(model, seeds, 3, 8)
    others = [drawn(model, seeds, 4, 8), drawn(model, seeds, 3, 9)]
    assert drawn(model, seeds, 3, 8) == right
    other = Draws()
    others.append(drawn(other, ForwardSeeds([other], 2, torch.device("cpu")), 3, 8))
    for found in others:
        assert all(theirs != ours for theirs, ours in zip(found, right, strict=True))


def test_each_block_and_each_call_has_its_own_numbers() -> None:
    """Two blocks draw different masks; so do two calls of one block."""
    model = Draws()
    masks = drawn(model, ForwardSeeds([model], 1, torch.device("cpu")), 1, 0)[3:]
    assert masks[0] != masks[1] != masks[2] != masks[0]


def test_a_block_alone_draws_the_same_numbers() -> None:
    """Whatever the block before it draws."""
    model, part = Draws(), Draws()
    right = drawn(model, ForwardSeeds([model], 1, torch.device("cpu")), 1, 0)
    part.blocks[0] = nn.Identity()
    got = drawn(part, ForwardSeeds([part], 1, torch.device("cpu")), 1, 0)
    assert got[3] != right[3]
    assert got[4:] == right[4:]


def test_a_model_compiled_as_a_whole_is_seeded_once() -> None:
    """Blocks then continue the numbers of those before."""
    model, part = Draws(), Draws()
    right = drawn(model, ForwardSeeds([model], 1, torch.device("cpu"), by_block=False), 1, 0)
    part.blocks[0] = nn.Identity()
    got = drawn(part, ForwardSeeds([part], 1, torch.device("cpu"), by_block=False), 1, 0)
    assert got[:2] == right[:2]
    assert got[4:] != right[4:]


@pytest.mark.parametrize("generator", ["torch", "python", "numpy"])
def test_an_evaluation_draws_from_where_training_was(generator: str) -> None:
    """Nothing is seeded in a model that does not train."""
    model = Draws()
    ForwardSeeds([model], 1, torch.device("cpu"))
    model.eval()
    at = {"torch": 2, "python": 0, "numpy": 1}[generator]
    assert model(torch.ones(4))[at] != model(torch.ones(4))[at]
