"""A token-wise network without attention: each position sees its own token only. A tiny model for tests.

Runs in: each train worker. May not import ray.

Shape suffixes: B sequences, T tokens, D width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from raydist.errors import UserError
from raydist.worker.model import part_of

if TYPE_CHECKING:
    from raydist.spec import ModelSpec


def build(spec: ModelSpec, vocab_size: int) -> MLP:
    """The model with initial weights; uses `layers`, `width`, `hidden` and `dropout` of the spec.

    Raises UserError on `model.options`.
    """
    if spec.options:
        raise UserError(
            f"model.options: mlp takes none, got {', '.join(sorted(spec.options))}",
            "remove them, or name your own model as package.module:build",
        )
    return MLP(spec, vocab_size)


class Layer(nn.Module):
    """Two linear layers with biases, added to the stream."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        hidden = spec.hidden or 4 * spec.width
        self.norm = nn.LayerNorm(spec.width)
        self.up, self.down = nn.Linear(spec.width, hidden), nn.Linear(hidden, spec.width)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """x_BTD -> BTD, through BTF."""
        y_BTD: Tensor = x_BTD + self.dropout(self.down(F.gelu(self.up(self.norm(x_BTD)))))
        return y_BTD


class MLP(nn.Module):
    """Embedding, layers, head: learns the next token from the current one."""

    def __init__(self, spec: ModelSpec, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, spec.width)
        self.blocks = nn.ModuleList(Layer(spec) for _ in range(spec.layers))
        self.head = nn.Linear(spec.width, vocab_size)

    def stage(self, first: int, last: int) -> MLP:
        """The part with blocks `first` to `last` - 1: see the contract in __init__.py."""
        return part_of(self, first, last, blocks="blocks", before=("embedding",), after=("head",))

    def forward(self, tokens_BT: Tensor, documents: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        """tokens_BT (int64) -> logits_BTV. `documents` has no effect: no token attends to another. `hidden`: see `stage`."""
        x_BTD: Tensor = self.embedding(tokens_BT) if hidden is None else hidden
        for block in self.blocks:
            x_BTD = block(x_BTD)
        if self._modules["head"] is None:  # a stage that others follow
            return x_BTD
        logits_BTV: Tensor = self.head(x_BTD)
        return logits_BTV
