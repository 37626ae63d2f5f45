"""The losses: one file each, found by the name in `train.loss`. This docstring is their contract.

Runs in: each train worker. Torch, never ray.

A loss is a file here, or your own `package.module:attribute`, and has

    build(spec: JobSpec) -> Loss

where a Loss is called with a model and a micro-batch (raydist/data/batches.py) and gives a scalar in fp32 that depends on the
model's parameters.

- It is the sum over the targets that are not MASKED, not their mean: the loop divides by the tokens of the global batch, so the
  loss does not depend on how the batch is split over ranks and micro-batches.
- `call_model` calls the model with what the batch has, and gives logits_BTV.
- The held-out loss is computed in the same way.
- `spec.train.loss.options` has what the job gives as options.

Optional, at the top level of the file, and free of torch: `Options`, a pydantic model that the options are checked against.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from raydist import registry

if TYPE_CHECKING:
    from raydist.data.batches import MicroBatch
    from raydist.spec import JobSpec

Loss = Callable[[nn.Module, "MicroBatch"], Tensor]


def build(spec: JobSpec) -> Loss:
    """The loss that the job names. Raises ExtensionNotFound."""
    return cast(Callable[["JobSpec"], Loss], registry.load("loss", spec.train.loss.name))(spec)


def call_model(module: nn.Module, batch: MicroBatch, **more: Any) -> Tensor:
    """The model's output for a batch: logits_BTV in the model's format; `documents` are passed where they are packed."""
    kwargs = {} if batch.documents is None else {"documents": batch.documents}
    made: Tensor = module(batch.tokens, **more, **kwargs)
    return made


def unwrapped(module: nn.Module) -> nn.Module:
    """The model without DDP's wrapper. A user's model may have a part of the name `module`, too."""
    return module.module if isinstance(module, DistributedDataParallel) else module
