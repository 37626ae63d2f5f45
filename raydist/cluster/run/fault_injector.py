"""The driver's part of injected faults: records each one as an event, and injects those that a rank cannot inject itself.

Runs in: the driver of a run with faults. Supervisor and RestartLoop call `look`. It calls MonitorClient. Never imports torch.

    rank --note--> RUN/faults --look--> event `fault`; kill the monitor, drain a node, ... --> RUN/faults/done
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayError

from raydist import faults
from raydist.cluster.leave import drain
from raydist.cluster.run.monitor_client import MonitorClient
from raydist.errors import StorageError
from raydist.faults import Fault, clock
from raydist.records import Event
from raydist.run.directory import RunDir
from raydist.run.log import read_events

_ANSWER_S = 30.0
_AGAIN_S = 0.1


class DriverInjector:
    """Call `look` often. `address`: HOST:PORT of the cluster's head. `asked`: all faults of the run."""

    def __init__(self, run: RunDir, monitor: MonitorClient, address: str, asked: Sequence[Fault]) -> None:
        self._run, self._monitor, self._address = run, monitor, address
        self._asked = dict(zip(faults.names(asked), asked, strict=True))
        self._lock = threading.Lock()
        self._before = frozenset(faults.read_notes(run))
        # A fault may have killed the driver before this one, before that one could record it.
        self._recorded = {str(event.data["note"]) for event in read_events(run) if event.kind == "fault"}
        self._recorded |= {name for name in self._before - self._recorded if faults.failed(run, name)}

    def look(self) -> None:
        """Records the faults since the last call, and injects those that are the driver's. From any thread."""
        with self._lock:
            try:
                new = faults.read_notes(self._run, known=self._recorded)
            except StorageError:
                return  # the next call tries again
            for name, note in new.items():
                self._recorded.add(name)
                asked = note["by"] == "driver" and name not in self._before
                if asked and note["fault"] == "kill_driver":
                    os.kill(os.getpid(), signal.SIGKILL)
                failed = ""
                if asked:
                    try:
                        self._inject(note)
                    except (
                        RayError,
                        TimeoutError,
                    ) as error:  # the head may just be lost, which the driver finds out elsewhere
                        failed = f"the fault {note['fault']} could not be injected: {error}"
                if failed:
                    self._monitor.note(failed)
                else:
                    self._record(name, note)
                if asked:
                    done = {"at": time.time(), "failed": failed}
                    self._run.storage.write(faults.done(name), json.dumps(done).encode())

    def say_what_is_missing(self) -> None:
        """Of a run that has finished: notes the faults that have not happened, as in a phase that their step does not have."""
        happened = {note.rpartition("/")[2].rpartition("-rank")[0] for note in self._recorded}
        for name, fault in self._asked.items():
            if name not in happened:
                of = "" if fault.rank is None else f" of rank {fault.rank}"
                self._monitor.note(
                    f"the fault {fault.fault}{of} in step {fault.step}, at its phase {fault.at}, has not happened: that step did "
                    "not have this phase, or was trained before the fault was asked for, or without that rank"
                )

    def _record(self, name: str, note: dict[str, Any]) -> None:
        data = {
            "fault": note["fault"],
            "rank": note["rank"],
            "step": note["step"],
            "attempt": note["attempt"],
            "asked": note["asked"],
            "note": name,
        }
        self._monitor.push(Event("fault", note["at"], data))

    def _inject(self, note: dict[str, Any]) -> None:
        import ray

        if note["fault"] == "kill_monitor":
            ray.kill(self._monitor.actor, no_restart=False)
            self._await_monitor()
        elif note["fault"] == "driver_clock_jump":
            ahead = float(note["asked"]["seconds"])
            ray.get(self._monitor.actor.__ray_call__.remote(_jump, ahead), timeout=_ANSWER_S)
            clock.jump(ahead)
        elif note["fault"] == "drain":
            drain(self._address, note["node_ip"], float(note["asked"]["deadline_s"]), "an injected fault")

    def _await_monitor(self) -> None:
        """Waits until the monitor answers again, so that the next events are not lost. Training does not need it: no error if
        not.
        """
        import ray

        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline:
            try:
                ray.get(self._monitor.actor.snapshot.remote(), timeout=deadline - time.monotonic())
                return
            except (RayError, TimeoutError):
                time.sleep(_AGAIN_S)


def _jump(actor: object, seconds: float) -> None:
    """In the process of that actor."""
    clock.jump(seconds)
