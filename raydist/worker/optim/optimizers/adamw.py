"""AdamW, torch's own.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.optim import AdamW, Optimizer

from raydist.extension_plans import OptimizerPlan
from raydist.worker.optim.optimizers import Named, decay_groups, kernel

if TYPE_CHECKING:
    from raydist.spec import OptimSpec


def _state_bytes(name: str, shape: tuple[int, ...], spec: OptimSpec) -> int:
    """Two moments in fp32, and a count of the steps."""
    return 8 * math.prod(shape) + 4


PLAN = OptimizerPlan(_state_bytes, offload=True)


def build(parameters: Named, spec: OptimSpec, device: torch.device) -> Optimizer:
    """See the contract in `__init__`."""
    return AdamW(
        decay_groups(parameters, spec),
        lr=spec.lr,
        betas=spec.betas,
        eps=spec.eps,
        **kernel(spec, device, fused=True),
    )
