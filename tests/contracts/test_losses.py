"""Every loss keeps the contract in worker/loss/__init__.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from raydist import registry
from raydist.data.batches import MASKED, MicroBatch
from raydist.worker.loss import Loss, build
from tests.training import VOCAB, job, samples

NAMES = registry.names("loss")


def of(name: str) -> tuple[Loss, nn.Module, MicroBatch]:
    """The loss, a model, and four sequences; in the last one three tokens count."""
    torch.manual_seed(1)
    spec = job("ddp", train={"loss": name})
    model: nn.Module = registry.load("model", "gpt")(spec.model, VOCAB)
    return build(spec), model, MicroBatch(*samples(4))


@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_sum(name: str) -> None:
    """A positive differentiable scalar in fp32; the loss of four sequences is the sum over two and two."""
    loss, model, batch = of(name)
    whole = loss(model, batch)
    assert (whole.shape, whole.dtype, whole.requires_grad) == ((), torch.float32, True)
    assert whole > 0
    halves = [loss(model, MicroBatch(batch.tokens[i : i + 2], batch.targets[i : i + 2])) for i in (0, 2)]
    torch.testing.assert_close(halves[0] + halves[1], whole)


@pytest.mark.parametrize("name", NAMES)
def test_masked_targets_do_not_count(name: str) -> None:
    """Masked targets add nothing, and a batch with only masked targets gives 0."""
    loss, model, batch = of(name)
    one = batch.targets.clone()
    one[:, 1:] = MASKED
    torch.testing.assert_close(
        loss(model, replace(batch, targets=one)),
        loss(model, MicroBatch(batch.tokens[:, :1], batch.targets[:, :1])),
    )
    assert loss(model, replace(batch, targets=torch.full_like(batch.targets, MASKED))) == 0
