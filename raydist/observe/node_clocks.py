"""Corrects the times of telemetry rows from nodes whose clocks are wrong: rules and pages compare the rows of all nodes.

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
        node, ahead = rows[0]["node"], sent - time.time()
        if abs(ahead - self._ahead.get(node, 0.0)) > WRONG_S:
            self._ahead[node] = ahead if abs(ahead) > WRONG_S else 0.0
        known = self._ahead.get(node, 0.0)
        return [{**row, "at": row["at"] - known} for row in rows] if known else rows
