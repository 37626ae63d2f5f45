"""The peers' model in a rank that turns its monitoring on and off alternately, for benchmarks/watching.py.

Runs in: each train worker. For STRETCH steps at a time it works as with `observe.interval_s: null`, except that the telemetry
thread still wakes up once per second and does nothing.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from peer_model import GPT

from raydist.ipc.mailbox import Mailbox
from raydist.worker.metrics import collective_counters
from raydist.worker.metrics.telemetry import Telemetry

WARM, STRETCH = 37, 12


class AlternatingMeter:
    """Counts forwards, one per step. Each start of a stretch appends time and processor seconds to OUT.RANK.turns.

    The file OUT.off exists while monitoring is off.
    """

    def __init__(self, out: str) -> None:
        rank = os.environ.get("RANK", "0")
        self._off = Path(f"{out}.off") if rank == "0" else None
        self._lines = os.open(f"{out}.{rank}.turns", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._steps = 0
        self._log: Any = None
        self._row, self._write = Telemetry.row, Mailbox.write

    def tick(self) -> None:
        """Called at the start of each forward."""
        if self._steps >= WARM and (self._steps - WARM) % STRETCH == 0:
            self._turn((self._steps - WARM) // STRETCH % 2 == 1)
            os.write(self._lines, f"{time.time():.6f} {time.process_time():.6f}\n".encode())
        self._steps += 1

    def _turn(self, on: bool) -> None:
        if on:
            self._log.install()
            Telemetry.row, Mailbox.write = self._row, self._write
            if self._off is not None:
                self._off.unlink()
            return
        self._log = self._log or collective_counters._installed
        self._log.close()
        Telemetry.row, Mailbox.write = (lambda telemetry: {}), (lambda mailbox, row: None)
        if self._off is not None:
            self._off.touch()


def build(model: Any, vocab_size: int) -> GPT:
    """The peers' model with an AlternatingMeter. `options` has `out`."""
    return GPT(AlternatingMeter(model.options["out"]))
