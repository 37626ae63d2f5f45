"""What the coordinator knows of an agent of its group. Imports neither torch nor ray."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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


def gone(type_name: str, message: str) -> dict[str, Any]:
    """`Agent.lost` of one whose node is lost, or no longer used."""
    return {"type_name": type_name, "message": message, "kind": "node_died"}
