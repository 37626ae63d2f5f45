"""ZeRO-2: gradients and optimizer state split over all ranks; parameters whole.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

from raydist.worker.parallel._zero import ZeroStrategy


class Strategy(ZeroStrategy):
    """Gradients are reduced in every micro-batch, block by block: whole ones exist of a block or two at a time."""

    reduce_each = True
