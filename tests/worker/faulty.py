"""Models that fail in a known way, for runs of the whole loop: `model.options` selects the failure."""

from __future__ import annotations

import torch
from torch import nn

from raydist.spec import ModelSpec
from raydist.worker.model import gpt


class Faulty(nn.Module):
    """A GPT with a saved buffer that counts forward passes. NaN for a batch with the sample whose first tokens are `poison`; out
    of memory for more than `room` sequences at once."""

    def __init__(self, model: ModelSpec, vocab_size: int) -> None:
        super().__init__()
        self.tensor_rules = {f"inner.{pattern}": kind for pattern, kind in gpt.GPT.tensor_rules.items()}
        self.inner = gpt.build(model.model_copy(update={"options": {}}), vocab_size)
        self.options = model.options
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens -> logits."""
        room = self.options.get("room")
        if self.training and room is not None and len(tokens) > room:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {len(tokens)} sequences")
        logits: torch.Tensor = self.inner(tokens)
        poison = self.options.get("poison")
        bad = poison is not None and any(row == poison for row in tokens.tolist())
        if self.training:
            self.seen += float("nan") if bad else 1.0
        return logits * self.options.get("times", float("nan")) if bad and self.training else logits


def check_tensor(model: ModelSpec, ranks: int) -> None:
    """Any number of ranks may split it."""


def build(model: ModelSpec, vocab_size: int) -> nn.Module:
    """The builder for `model.name: tests.worker.faulty:build`."""
    return Faulty(model, vocab_size)
