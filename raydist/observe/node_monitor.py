"""Monitors one node: its GPUs, its kernel counters and its ranks. Sends them as rows to the run's monitor.

Runs in: one zero-CPU actor on each node that has ranks, owned by the driver; on a private Ray, which is one node, in the driver
itself. Must not import torch. Imports ray in functions only: `NodeMonitor` is a plain class.

    ranks --mailbox--> NodeMonitor <-- NVML, /proc, /sys
                         |---- observe(rows) ----> RunMonitor      every `interval_s`; does not wait for an answer

No other process depends on it: while it is down, rows are missing.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from raydist.ipc import mailbox
from raydist.observe.hardware.cgroup import CpuGroups
from raydist.observe.hardware.host import Host, process
from raydist.observe.hardware.nvml import Gpus, Reading
from raydist.run.telemetry_schema import COLUMNS, GPU, NODE, is_total

_KEPT = 60
"""Readings kept while the monitor does not answer; then the oldest are dropped."""
_FIRST_S = 30.0
_CLOSE_S = 2.0
STOPPED = "Tt"
"""States of a process that a signal or a debugger has stopped."""
_ARRIVE_S = 0.5

Row = dict[str, Any]


class NodeMonitor:
    """Reads and sends from construction to `close`. `node`: IP address of the node in the cluster.

    `monitor`: handle of an actor that has `observe(rows)`, or its pickle. `folder`: folder whose free space is reported. `env`: the
    ranks' environment variables that this process does not have.
    """

    def __init__(
        self,
        run_uri: str,
        node: str,
        monitor: Any,
        interval_s: float,
        folder: str,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if isinstance(monitor, bytes):
            from ray import cloudpickle

            monitor = cloudpickle.loads(monitor)
        mailbox.clear_stale()
        self._run_uri, self._node, self._monitor, self._interval_s = run_uri, node, monitor, interval_s
        self._host = Host(node, folder, env)
        self._name = socket.gethostname()
        self._seen: dict[int, tuple[Any, Any]] = {}
        self._quotas = CpuGroups()
        self._stopped: dict[int, int] = {}
        self._unsent: deque[list[Row]] = deque(maxlen=_KEPT)
        self._call: Any = None
        self._complained = False
        self._first, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="raydist-node", daemon=True)
        self._thread.start()

    def note(self) -> str | None:
        """Which metrics of this node are missing, and why, in one line; None if all are there. Waits for the first reading."""
        if not self._first.wait(_FIRST_S):
            return f"no GPU metrics: the GPU driver has not answered for {_FIRST_S:.0f} s"
        return self._gpus.note()

    def close(self) -> None:
        """Ends the monitor. The last rows have arrived if the run's monitor answers within 1 s. Clears the ranks' mailboxes."""
        self._ended.set()
        self._thread.join(_CLOSE_S)  # a GPU driver that hangs may block it; then it ends with this process
        if not self._thread.is_alive():
            for _ in range(2):  # the pending call, and one for the rows read meanwhile
                self._send(_ARRIVE_S)
        mailbox.clear(self._run_uri, self._node)

    def read(self) -> list[Row]:
        """The current rows: the node's, one per GPU, and the new rows of its ranks. Nulls are left out."""
        ranks = {row["rank"]: row for row in mailbox.read(self._run_uri, self._node)}
        used = {rank: self._process(row["pid"]) for rank, row in ranks.items()}
        living = {rank: row for rank, row in ranks.items() if used[rank]}
        gpus = self._gpus.read()
        places = place(living, gpus)
        now = time.monotonic()
        who = {"at": time.time(), "host": self._name, "node": self._node}
        rows = [{**who, "kind": "node", **self._host.read()}]
        rows += [
            {
                **who,
                "kind": "gpu",
                **gpu.row,
                **shared(gpu, {r: row["pid"] for r, row in living.items() if places.get(r) == i}),
            }
            for i, gpu in enumerate(gpus)
        ]
        for rank, row in living.items():
            age = now - row["monotonic"]
            new = (row.get("attempt"), row["monotonic"])
            stopped = used[rank].pop("state") in STOPPED
            if self._seen.get(rank) != new or stopped:
                self._seen[rank] = new
                if stopped:  # it cannot write: its newest row again, with the time for which it is late
                    late, age = max(age - self._interval_s, 0.0), 0.0
                    row = {**row, "held_seconds": (row.get("held_seconds") or 0.0) + late}
                values = {
                    name: value for name, value in row.items() if value is not None and name not in mailbox.PRIVATE
                }
                found = used[rank]
                if rank in places:
                    gpu = gpus[places[rank]]
                    found = {**found, "gpu": gpu.row["gpu"], "gpu_process_bytes": gpu.processes.get(row["pid"])}
                found = {name: value for name, value in found.items() if value is not None}
                rows.append({**found, **values, **who, "kind": "rank", "at": who["at"] - age})
        for rank, row in living.items():
            if injected := row.get(mailbox.INJECTED):
                inject(rows, rank, gpus[places[rank]].row["gpu"] if rank in places else rank, injected, who)
        return rows

    # --- private

    def _process(self, pid: int) -> Row:
        """A rank's process, with how often it was seen stopped."""
        row = process(pid)
        if not row:
            self._stopped.pop(pid, None)
            return row
        stopped = self._stopped.get(pid, 0) + (row["state"] in STOPPED)
        self._stopped[pid] = stopped
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            row["throttled_seconds"] = self._quotas.throttled_seconds(pid)
        return {**row, "stopped_count": stopped}

    def _watch(self) -> None:
        self._gpus = Gpus()  # in this thread, because it may take seconds
        due = time.monotonic()
        while True:
            try:
                self._unsent.append(self.read())
                self._send()
            except Exception:  # a failed reading must not end the monitor
                if not self._complained:
                    logging.getLogger(__name__).exception("a reading of node %s failed", self._node)
                self._complained = True
            self._first.set()
            due = max(due + self._interval_s, time.monotonic())  # a late reading is not caught up
            if self._ended.wait(due - time.monotonic()):
                break
        self._gpus.close()

    def _send(self, wait_s: float = 0.0) -> None:
        """Sends all unsent rows, unless the previous call is still pending. Rows sent to a killed monitor are lost."""
        if self._call is not None:
            import ray
            from ray.exceptions import RayError

            done, _ = ray.wait([self._call], timeout=wait_s)
            if not done:
                return
            with contextlib.suppress(RayError):
                ray.get(self._call)  # else Ray reports an unretrieved error
        rows = [row for reading in self._unsent for row in reading]
        self._unsent.clear()
        self._call = self._monitor.observe.remote(rows, time.time()) if rows else None


def place(ranks: Mapping[int, Mapping[str, Any]], gpus: Sequence[Reading]) -> dict[int, int]:
    """rank -> index of its GPU in `gpus`: by the UUID that the rank reports, else by the process that NVML sees on it.

    `ranks`: rows with `pid`, and perhaps `gpu_uuid`. In a container NVML may report the host's pids.
    """
    found = {}
    for rank, row in ranks.items():
        said = (row.get("gpu_uuid") or "").removeprefix("GPU-")
        by_name = [i for i, gpu in enumerate(gpus) if said and (gpu.uuid or "").removeprefix("GPU-") == said]
        by_process = [i for i, gpu in enumerate(gpus) if row["pid"] in gpu.processes]
        if by_name or by_process:
            found[rank] = (by_name or by_process)[0]
    return found


def inject(rows: list[Row], rank: int, gpu: int, injected: Mapping[str, Any], who: Row) -> None:
    """Puts readings of the fault `reading` into the rows of a rank, its GPU and its node; adds those of a total. Adds a row of its
    GPU if it has none."""
    for name, value in injected.items():
        kind = "node" if name in NODE else "gpu" if name in GPU else "rank"
        subject = {"node": {}, "gpu": {"gpu": gpu}, "rank": {"rank": rank}}[kind]
        row = next((r for r in rows if r["kind"] == kind and all(r.get(k) == v for k, v in subject.items())), None)
        if row is None and kind == "gpu":
            row = {**who, "kind": kind, "gpu": gpu, "rank": rank}
            rows.append(row)
        if row is not None:  # a rank without a new row has none
            made = value + (row.get(name) or 0) if is_total(name) else value
            row[name] = made if isinstance(made, str) or str(COLUMNS[name][0]) == "double" else int(made)
    for row in rows:
        if row["kind"] == "rank" and row["rank"] == rank and any(name in GPU for name in injected):
            row.setdefault("gpu", gpu)


def shared(gpu: Reading, ranks: Mapping[int, int]) -> Row:
    """Who uses a GPU: `rank`, and the bytes of this run's ranks and of others, if known. `ranks`: this GPU's, rank -> pid."""
    row: Row = {"rank": min(ranks)} if ranks else {}
    pids = set(ranks.values())
    if pids <= gpu.processes.keys():
        ours = [used for pid, used in gpu.processes.items() if pid in pids]
        others = [used for pid, used in gpu.processes.items() if pid not in pids]
        for column, used in (("gpu_process_bytes", ours), ("gpu_other_bytes", others)):
            if None not in used and (used or column == "gpu_other_bytes"):
                row[column] = sum(n for n in used if n is not None)
    return row
