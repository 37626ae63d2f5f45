"""Takes the readings of some nodes in the monitor's stead, where a run has more than one process can hold.

Runs in: a zero-CPU actor on one of those nodes, owned by the driver. Must not import torch. Imports ray in functions only.

    agents of 64 nodes --observe(rows)--> Aggregator --> samples/*.N.parquet, the rules of raydist.diagnosis
                                              |---- push([], findings), export(newest rows, every 10 s) ----> RunMonitor

Each keeps to its own segments, so none waits for another. Nobody waits for a aggregator either: while it is gone, rows are missing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from raydist.diagnosis import Diagnosis
from raydist.errors import StorageError
from raydist.records import Event
from raydist.run.directory import RunDir
from raydist.run.telemetry_log import TelemetryLog

NODES = 64
"""How many nodes one process takes the readings of: 512 ranks and as many GPUs, where a node has 8."""
INTERVAL_S = 2.0
HAND_ON_S = 10.0
"""How often exporters are given the newest rows."""
_ROWS_KEPT = 100_000
_ARRIVE_S = 2.0

Row = Mapping[str, Any]


class Aggregator:
    """From its construction to `close`. `number`: of its segments, from 1. `monitor`: the RunMonitor's handle, perhaps pickled."""

    def __init__(self, run_uri: str, number: int, monitor: Any, interval_s: float = INTERVAL_S) -> None:
        if isinstance(monitor, bytes):
            from ray import cloudpickle

            monitor = cloudpickle.loads(monitor)
        self._monitor, self._interval_s = monitor, interval_s
        self._samples = TelemetryLog(RunDir(run_uri), number)
        self._diagnosis = Diagnosis()
        self._lock = threading.Lock()
        self._rows: list[Row] = []
        self._newest: dict[tuple[Any, ...], Row] = {}
        self._handed = time.monotonic()
        self._refused = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write, name="raydist-gather", daemon=True)
        self._thread.start()

    def observe(self, rows: Sequence[Row]) -> None:
        """As `RunMonitor.observe`. Returns at once."""
        self._samples.add(rows)
        with self._lock:
            self._rows += rows
            del self._rows[:-_ROWS_KEPT]
            for row in rows:
                self._newest[row["kind"], row["node"], row.get("gpu" if row["kind"] == "gpu" else "rank")] = row

    def close(self) -> None:
        """The run is over: what was given is durable, unless storage refuses it; the monitor has its part, if it answers in 2 s."""
        self._ended.set()
        self._thread.join()
        told = [call for call in self._round(hand_on=True) if call is not None]  # None: of a monitor in this process
        if told:
            import ray

            ray.wait(told, num_returns=len(told), timeout=_ARRIVE_S)

    # --- inside

    def _write(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._round(hand_on=time.monotonic() - self._handed >= HAND_ON_S)

    def _round(self, hand_on: bool) -> list[Any]:
        """Gives the calls that tell the monitor."""
        with self._lock:
            rows, self._rows = self._rows, []
            newest: list[Row] = []
            if hand_on:
                newest, self._newest, self._handed = list(self._newest.values()), {}, time.monotonic()
        events = [finding.event(time.time()) for finding in self._diagnosis.observe(rows)]
        try:
            self._samples.flush()
            self._refused = False
        except StorageError as error:
            if not self._refused:
                text = f"readings could not be written, and are kept for a while: {error}"
                events.append(Event("note", time.time(), {"text": text}))
            self._refused = True
        told = []
        if events:
            told.append(self._monitor.push.remote([], [event.to_dict() for event in events]))
        if newest:
            told.append(self._monitor.export.remote(newest))
        return told
