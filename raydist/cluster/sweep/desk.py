"""Where the cells leave their reports, and Ray Tune's actors wait for them.

Runs in: one zero-CPU actor, owned by the driver and on its node. Imports ray in `start_desk` only; never torch.

    cell's thread in the driver --post--> Desk <--take-- Ray Tune's actor of the cell: one report is one iteration of Ray Tune's
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

NAME = "raydist-desk"


class Desk:
    """Every method is a coroutine of one event loop."""

    def __init__(self) -> None:
        self._reports: defaultdict[str, asyncio.Queue[dict[str, Any]]] = defaultdict(asyncio.Queue)

    async def post(self, cell: str, report: Mapping[str, Any]) -> None:
        """What a cell has to tell; its last report has `done`."""
        self._reports[cell].put_nowait(dict(report))

    async def take(self, cell: str) -> dict[str, Any]:
        """The oldest report of a cell that nobody has taken; waits for it."""
        report = await self._reports[cell].get()
        if report["done"]:
            self._reports.pop(cell, None)
        return report

    async def forget(self, cell: str) -> None:
        """Nobody takes any more of that cell's reports."""
        self._reports.pop(cell, None)


def start_desk() -> Any:
    """The sweep's desk as an actor: zero CPUs, on this process's node, gone with this process. Returns its handle at once."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(Desk).options(name=NAME, num_cpus=0, max_concurrency=100_000, scheduling_strategy=here).remote()
