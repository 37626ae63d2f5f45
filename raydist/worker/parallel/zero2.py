"""ZeRO-2: gradients and optimizer state split over all ranks; parameters whole.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

from raydist.extension_plans import StrategyPlan
from raydist.worker.parallel._zero import ZeroStrategy

PLAN = StrategyPlan(sharded=("optimizer", "gradients"), compresses=True, parts=True, without_example=True)


class Strategy(ZeroStrategy):
    """Gradients are reduced in every micro-batch, block by block: only one or two blocks have whole gradients at a time."""

    reduce_each = True
