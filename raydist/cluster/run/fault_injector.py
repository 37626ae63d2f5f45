"""The driver's part in injected faults: says of each that it happened, and does what no rank can do to itself.

Runs in: the driver of a run with faults. Never imports torch.

    rank --note--> RUN/faults --look--> event `fault`; the monitor killed, a node drained, this process killed --> RUN/faults/done
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from raydist import faults
from raydist.errors import StorageError
from raydist.records import Event
from raydist.run.directory import RunDir
from raydist.run.log import read_events

_ANSWER_S = 30.0
_AGAIN_S = 0.1


class DriverInjector:
    """`look` often. `say` takes events; `monitor` is the run's, `address` the cluster's head."""

    def __init__(self, run: RunDir, say: Callable[[Event], None], monitor: Any, address: str) -> None:
        self._run, self._say, self._monitor, self._address = run, say, monitor, address
        self._lock = threading.Lock()
        self._before = frozenset(faults.read_notes(run))
        # The driver before this one may have been killed by a fault before it could say so.
        self._told = {str(event.data["note"]) for event in read_events(run) if event.kind == "fault"}

    def look(self) -> None:
        """Says what has happened since the last look, and does what is asked for. From any thread."""
        with self._lock:
            try:
                new = faults.read_notes(self._run, known=self._told)
            except StorageError:
                return  # the next look will tell
            for name, note in new.items():
                self._told.add(name)
                asked = note["by"] == "driver" and name not in self._before
                if asked and note["fault"] == "kill_driver":
                    os.kill(os.getpid(), signal.SIGKILL)
                if asked:
                    self._do(note)
                self._tell(name, note)
                if asked:
                    self._run.storage.write(faults.done(name), json.dumps({"at": time.time()}).encode())

    def _tell(self, name: str, note: dict[str, Any]) -> None:
        data = {
            "fault": note["fault"],
            "rank": note["rank"],
            "step": note["step"],
            "attempt": note["attempt"],
            "asked": note["asked"],
            "note": name,
        }
        self._say(Event("fault", note["at"], data))

    def _do(self, note: dict[str, Any]) -> None:
        import ray

        if note["fault"] == "kill_monitor":
            ray.kill(self._monitor, no_restart=False)
            self._await_monitor()
        elif note["fault"] == "drain":
            self._drain(note["node_ip"], float(note["asked"]["deadline_s"]))

    def _await_monitor(self) -> None:
        """Until it is there again, or nobody would hear what is told next. Training goes on without it, so it may stay away."""
        import ray
        from ray.exceptions import RayError

        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline:
            try:
                ray.get(self._monitor.snapshot.remote(), timeout=deadline - time.monotonic())
                return
            except (RayError, TimeoutError):
                time.sleep(_AGAIN_S)

    def _drain(self, node_ip: str, deadline_s: float) -> None:
        """What `ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION` does."""
        import ray
        from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled
        from ray.core.generated import autoscaler_pb2

        until_ms = int((time.time() + deadline_s) * 1000)
        gcs = GcsClient(address=self._address)
        for node in ray.nodes():
            if node["Alive"] and node["NodeManagerAddress"] == node_ip:
                reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
                gcs.drain_node(node["NodeID"], reason, "an injected fault", until_ms)
