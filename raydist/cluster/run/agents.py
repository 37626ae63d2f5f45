"""What the coordinator knows of an agent of its group. Imports neither torch nor ray."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

KILLED, NOT_KILLED = "Killed", "NotKilled"
"""type_name of a rank that ended because the coordinator had it killed, and of one that did not end then. They are no causes."""


@dataclass(slots=True)
class Agent:
    """`offer`: node (its id), placement_group, local_rank; host and port for the ranks' rendezvous. `beat`: when it called last."""

    offer: Mapping[str, Any]
    beat: float
    lost: dict[str, Any] | None = None
    """Why it is no longer in the group: the fields of RankError."""
    waiting: list[asyncio.Event] = field(default_factory=list)
    """Of its calls of `next`."""

    def wake(self) -> None:
        """There is a new order, or it is no longer in the group."""
        for news in self.waiting:
            news.set()
        self.waiting.clear()


def first_lost(agents: Iterable[Agent]) -> dict[str, Any]:
    """Why an agent was lost, if one was; else why one is no longer used."""
    lost = [agent.lost for agent in agents if agent.lost is not None]
    return min(lost, key=lambda error: error["type_name"] == "Retired")


def not_killed(agent: Agent, rank: int, seconds: float) -> dict[str, Any]:
    """`Agent.lost` of one whose rank does not end."""
    message = (
        f"rank {rank} on node {agent.offer['node'][:8]} ({agent.offer['host']}) has not ended {seconds:.0f} s after SIGKILL: its "
        "process hangs in the kernel, as in a driver, or for a disk or a network file system, and keeps its GPU memory"
    )
    return {"type_name": NOT_KILLED, "message": message, "kind": "communication"}


def gone(type_name: str, message: str) -> dict[str, Any]:
    """`Agent.lost` of one whose node is lost, or no longer used."""
    return {"type_name": type_name, "message": message, "kind": "node_died"}
