"""ZeRO-1: optimizer state split over all ranks; parameters and gradients whole.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

from raydist.worker.parallel._zero import ZeroStrategy


class Strategy(ZeroStrategy):
    """Gradients add up over a step's micro-batches and are reduced once, in the last: the least that can be sent."""

    reduce_each = False
