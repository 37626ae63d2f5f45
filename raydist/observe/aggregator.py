"""Stores and checks the telemetry rows of some nodes, for runs with more nodes than one monitor process can handle.

Runs in: a zero-CPU actor on one of those nodes, owned by the driver. Must not import torch. Imports ray in functions only.

    node monitors of 64 nodes --observe(rows)--> Aggregator --> samples/*.N.parquet, the rules of raydist.diagnosis
                                              |---- push([], findings), export(newest rows, every 10 s) ----> RunMonitor

Each aggregator writes its own segments, so none waits for another. No other process waits for an aggregator: while it is down,
rows are missing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from raydist.diagnosis import Diagnosis
from raydist.errors import StorageError
from raydist.observe.node_clocks import NodeClocks
from raydist.records import Event
from raydist.run.directory import NOTE_S, RunDir
from raydist.run.telemetry_log import TelemetryLog

NODES = 64
"""Nodes per process: 512 ranks and as many GPUs, where a node has 8."""
INTERVAL_S = 2.0
HAND_ON_S = 10.0
"""How often the exporters get the newest rows."""
_ROWS_KEPT = 100_000
_ARRIVE_S = 2.0

Row = Mapping[str, Any]


class Aggregator:
    """Runs from construction to `close`. `number`: of its segments, from 1. `monitor`: RunMonitor's handle, or its pickle.

    The constructor waits for the run's folder up to `wait_s`, as that of a restarted RunMonitor does.
    """

    def __init__(
        self, run_uri: str, number: int, monitor: Any, interval_s: float = INTERVAL_S, wait_s: float = NOTE_S
    ) -> None:
        if isinstance(monitor, bytes):
            from ray import cloudpickle

            monitor = cloudpickle.loads(monitor)
        self._monitor, self._interval_s = monitor, interval_s
        self._samples, self._clocks = TelemetryLog(RunDir(run_uri).expect(wait_s), number), NodeClocks()
        self._diagnosis = Diagnosis()
        self._lock = threading.Lock()
        self._rows: list[Row] = []
        self._newest: dict[tuple[Any, ...], Row] = {}
        self._handed = time.monotonic()
        self._refused = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write, name="raydist-gather", daemon=True)
        self._thread.start()

    def observe(self, rows: Sequence[Row], sent: float | None = None) -> None:
        """Same as `RunMonitor.observe`. Returns at once."""
        rows = self._clocks.correct(rows, sent)
        self._samples.add(rows)
        with self._lock:
            self._rows += rows
            del self._rows[:-_ROWS_KEPT]
            for row in rows:
                self._newest[row["kind"], row["node"], row.get("gpu" if row["kind"] == "gpu" else "rank")] = row

    def close(self) -> None:
        """Ends the aggregator. All rows are durable, unless storage refuses them. Waits at most 2 s for the monitor."""
        self._ended.set()
        self._thread.join()
        calls = [call for call in self._round(hand_on=True) if call is not None]  # None: the monitor is in this process
        if calls:
            import ray

            ray.wait(calls, num_returns=len(calls), timeout=_ARRIVE_S)

    # --- private

    def _write(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._round(hand_on=time.monotonic() - self._handed >= HAND_ON_S)

    def _round(self, hand_on: bool) -> list[Any]:
        """Returns the calls to the monitor that it started."""
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
        calls = []
        if events:
            calls.append(self._monitor.push.remote([], [event.to_dict() for event in events]))
        if newest:
            calls.append(self._monitor.export.remote(newest))
        return calls
