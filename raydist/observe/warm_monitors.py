"""Monitors that are started before their run: a new process takes a second, and the next trial of a sweep need not wait for it.

Runs in: `WarmMonitors` in the driver, `WarmMonitor` in a zero-CPU actor next to it. Must not import torch. Imports ray in functions
only.

A monitor belongs to one run only: ranks of an earlier run may still push to their own monitor. So a warm monitor is a new actor,
idle until `take` assigns it a run. Ray restarts a killed actor with its original arguments; the assigned run is therefore stored
in a file on the same host, the slot.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from raydist.observe.monitor_actor import placed, start_monitor
from raydist.observe.run_monitor import INTERVAL_S, RunMonitor
from raydist.private_files import open_private
from raydist.run.driver_process import this_process

_TAKE_S = 30.0


class WarmMonitor(RunMonitor):
    """A RunMonitor after `take`. `slot`: path of a file on this host for this actor only, which does not exist yet."""

    def __init__(self, slot: str) -> None:
        self._slot = Path(slot)
        try:
            file = open_private(self._slot)
        except FileNotFoundError:
            return
        with os.fdopen(file) as text:
            arguments = json.load(text)
        super().__init__(**arguments)  # Ray restarted it after it was killed

    def take(self, arguments: Mapping[str, Any]) -> None:
        """Assigns the run. `arguments`: RunMonitor's arguments as plain data. Raises what RunMonitor raises."""
        part = self._slot.with_suffix(".part")
        # Readable by this user only, because a URI may contain secrets; a restarted actor must be able to open it.
        with os.fdopen(open_private(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
            json.dump(arguments, file)
        os.replace(part, self._slot)
        super().__init__(**arguments)


class WarmMonitors:
    """Provides the monitors of runs, and keeps one ready for the next run while `wanted()` is true. Thread-safe.

    `folder`: an existing one on this host, in which a private one for the slots is made; `end` deletes that.
    """

    def __init__(self, folder: Path, wanted: Callable[[], bool] = lambda: True) -> None:
        self._folder, self._wanted = folder, wanted
        self._slots: Path | None = None
        self._lock = threading.Lock()
        self._ready: Any = None
        self._numbers = itertools.count(1)
        self._ended = False

    def prepare(self) -> None:
        """Starts a monitor, unless one is ready or none is wanted. Returns at once."""
        with self._lock:
            if self._ready is None and not self._ended and self._wanted():
                # Of any name: on a cluster other users may be able to write to Ray's folder.
                self._slots = self._slots or Path(tempfile.mkdtemp(prefix="monitors-", dir=self._folder))
                self._ready = placed(WarmMonitor).remote(str(self._slots / f"{next(self._numbers)}.json"))

    def get(self, run_uri: str, exporters: Sequence[Mapping[str, Any]], spec: Mapping[str, Any]) -> Any:
        """The monitor of that run, as `start_monitor` returns it: the ready one if there is one and it works."""
        import ray
        from ray.exceptions import RayError

        with self._lock:
            ready, self._ready = self._ready, None
        if ready is not None:
            arguments = {
                "run_uri": run_uri,
                "driver": this_process(),
                "interval_s": INTERVAL_S,
                "exporters": [dict(each) for each in exporters],
                "spec": dict(spec),
            }
            try:
                ray.get(ready.take.remote(arguments), timeout=_TAKE_S)
                return ready
            except RayError:  # it was killed or failed: a new one reports the reason
                ray.kill(ready)
        return start_monitor(run_uri, exporters=exporters, spec=spec)

    def end(self) -> None:
        """No more runs follow: ends the monitor that is ready. The monitors of runs end with their runs."""
        import ray
        from ray.exceptions import RayError

        with self._lock:
            self._ended = True
            ready, self._ready = self._ready, None
        if ready is not None:
            with suppress(RayError):
                ray.kill(ready)
        if self._slots is not None:
            shutil.rmtree(self._slots, ignore_errors=True)
