"""SGD with momentum, torch's own.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.optim import SGD, Optimizer

from raydist.extension_plans import OptimizerPlan
from raydist.worker.optim.optimizers import Named, decay_groups, kernel

if TYPE_CHECKING:
    from raydist.spec import OptimSpec


def _state_bytes(name: str, shape: tuple[int, ...], spec: OptimSpec) -> int:
    """The momentum, in fp32."""
    return 4 * math.prod(shape) if spec.momentum else 0


PLAN = OptimizerPlan(_state_bytes)


def build(parameters: Named, spec: OptimSpec, device: torch.device) -> Optimizer:
    """See the contract in `__init__`."""
    return SGD(decay_groups(parameters, spec), lr=spec.lr, momentum=spec.momentum, **kernel(spec, device, fused=True))
