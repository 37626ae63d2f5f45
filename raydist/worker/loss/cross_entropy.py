"""Cross entropy of the next token, in nats.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from raydist.data.batches import MASKED, MicroBatch
from raydist.worker.loss import Loss, call_model, unwrapped

if TYPE_CHECKING:
    from raydist.spec import JobSpec


def build(spec: JobSpec) -> Loss:
    """See the contract in `__init__`."""
    return loss_sum


def loss_sum(module: nn.Module, batch: MicroBatch) -> Tensor:
    """Summed over the targets that count: a scalar in fp32. A model with `gives_loss` computes it itself."""
    if getattr(unwrapped(module), "gives_loss", False):
        return call_model(module, batch, targets=batch.targets)
    logits_BTV = call_model(module, batch)
    return F.cross_entropy(
        logits_BTV.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=MASKED, reduction="sum"
    )
