"""The tests' smallest model."""

from __future__ import annotations

import pytest
import torch

from raydist.errors import UserError
from raydist.spec import ModelSpec
from raydist.worker.model import mlp


@torch.no_grad()
def test_each_token_stands_alone():
    """Shuffled tokens give shuffled logits."""
    model = mlp.build(ModelSpec(name="mlp", layers=1, width=8), 11)
    tokens_BT, order = torch.arange(10).view(1, 10), torch.randperm(10, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(tokens_BT[:, order]), model(tokens_BT)[:, order])


def test_sizes_follow_the_spec():
    """layers, width and hidden; hidden is four times the width unless it is given."""
    build = mlp.build
    assert build(ModelSpec(layers=3, width=8), 11).blocks[2].up.weight.shape == (32, 8)
    assert build(ModelSpec(layers=1, width=8, hidden=5), 11).blocks[0].up.weight.shape == (5, 8)


def test_options_are_refused():
    """An unknown option is an error, and is named."""
    with pytest.raises(UserError, match="mlp takes none, got depth"):
        mlp.build(ModelSpec(options={"depth": 2}), 11)
