"""Adafactor, torch's own: of a matrix it keeps a second moment of rows and columns only.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.optim import Adafactor, Optimizer

from raydist.extension_plans import OptimizerPlan
from raydist.spec.parts import problem
from raydist.worker.optim.optimizers import Named, decay_groups, kernel

if TYPE_CHECKING:
    from raydist.spec import OptimSpec


def _state_bytes(name: str, shape: tuple[int, ...], spec: OptimSpec) -> int:
    """Row and column moments of a matrix, one moment of a vector, in fp32, and a count of the steps."""
    if len(shape) >= 2:
        return 4 * (math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1]) + 4
    return 4 * math.prod(shape) + 4


PLAN = OptimizerPlan(_state_bytes, whole_matrices=True)


def check_spec(spec: OptimSpec) -> None:
    """Raises SpecValueError for `fused: true`: torch has no such kernel for Adafactor on any device."""
    if spec.fused is True:
        raise problem(
            "fused", True, "does not go with name: adafactor, which has no fused kernel", "set optim.fused: auto"
        )


def build(parameters: Named, spec: OptimSpec, device: torch.device) -> Optimizer:
    """See the contract in `__init__`."""
    # Adafactor's own eps are for factored moments; `optim.eps`, for Adam's root, would be wrong by orders of magnitude.
    foreach = kernel(spec, device, fused=False)["foreach"]
    return Adafactor(decay_groups(parameters, spec), lr=spec.lr, foreach=foreach)
