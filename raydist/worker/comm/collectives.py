"""torch's collectives of one tensor per rank, by the names of torch 2.13, which warns of the old ones.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def _named(new: str, old: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(dist, new, None) or getattr(dist, old)
    return found


all_gather = _named("all_gather_single", "all_gather_into_tensor")
"""All ranks' `input`, one after another, into `output`: (output, input, group=None, async_op=False)."""
reduce_scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")
"""The sum over the ranks of this rank's part of `input` into `output`: (output, input, op=SUM, group=None, async_op=False)."""
