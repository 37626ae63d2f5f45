"""ZeRO-1: optimizer state split over all ranks; parameters and gradients whole.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

from raydist.extension_plans import StrategyPlan
from raydist.worker.parallel._zero import ZeroStrategy

PLAN = StrategyPlan(sharded=("optimizer",), compresses=True, parts=True, without_example=True)


class Strategy(ZeroStrategy):
    """Gradients are accumulated over the micro-batches of a step and reduced once, in the last: the fewest bytes to send."""

    reduce_each = False
