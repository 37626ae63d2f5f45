"""Corrects the times of telemetry rows and events from nodes whose clocks are wrong: rules and pages compare those of all nodes.

Runs in: the run's monitor, and each aggregator, whose clock is the one that counts. Never imports ray or torch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

WRONG_S = 60.0
"""A clock that differs by less is not corrected: a message may take so long, and rules compare the last three minutes."""

Row = Mapping[str, Any]


class NodeClocks:
    """What is known of the clocks of nodes, from their messages in order."""

    def __init__(self) -> None:
        self._ahead: dict[str, float] = {}

    def correct(self, rows: Sequence[Row], sent: float | None) -> Sequence[Row]:
        """The rows of a node, by this process's clock. `sent`: when it sent them, by its own clock; None: its clock is this one.

        While a wrong clock stays as wrong as it is, all rows are moved as far.
        """
        if not rows or sent is None:
            return rows
        ahead = self.ahead(rows[0]["node"], sent)
        return [{**row, "at": row["at"] - ahead} for row in rows] if ahead else rows

    def ahead(self, node: str, sent: float) -> float:
        """How many seconds that node's clock is ahead of this one; 0 if it is right. `sent`: as above, of a message that comes now.

        Whole seconds: after a restart of this process nearly always the same, so that an event that is sent again is recognised.
        """
        known, ahead = self._ahead.get(node, 0.0), sent - time.time()
        if abs(ahead - known) > WRONG_S:
            known = self._ahead[node] = float(round(ahead)) if abs(ahead) > WRONG_S else 0.0
        return known
