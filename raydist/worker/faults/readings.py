"""Readings of telemetry that are not so: what the node monitor is to tell in place of what it reads (observe/node_monitor.py).

Runs in: a rank of a run with faults. Neither torch nor ray.
"""

from __future__ import annotations

import time
from typing import Any

from raydist import faults
from raydist.ipc.mailbox import INJECTED
from raydist.run.telemetry_schema import is_total


class Readings:
    """`read` is a source of a rank's telemetry."""

    def __init__(self) -> None:
        self._begun: list[tuple[faults.Reading, float]] = []

    def begin(self, fault: faults.Reading) -> None:
        """It lasts for its time; what is added to a total stays."""
        self._begun.append((fault, time.monotonic()))

    def read(self) -> dict[str, Any]:
        """The newest fault of a column counts."""
        found: dict[str, float | str] = {}
        for fault, begun in self._begun:
            lasted = time.monotonic() - begun
            if is_total(fault.column):
                found[fault.column] = float(fault.value) * min(lasted, fault.seconds)
            elif lasted < fault.seconds:
                found[fault.column] = fault.value
        return {INJECTED: found} if found else {}
