"""Gradients are sent in bf16, and summed in fp32.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

import torch

from raydist.extension_plans import CompressorPlan
from raydist.worker.comm.compressors._cast import Cast

PLAN = CompressorPlan(bits=16.0, outer=True, loss_increase=0.0)


class Compressor(Cast):
    """The range of fp32, in 8 bits of precision."""

    dtype = torch.bfloat16
