"""Monitors that are started before their run: a new process takes a second, which a sweep's next cell need not wait for.

Runs in: `WarmMonitors` in the driver, `WarmMonitor` in a zero-CPU actor beside it. Must not import torch. Imports ray in functions
only.

A monitor is one run's alone: what ranks of an earlier run still push goes to that run's. So one that is ready is a new actor,
which does nothing until it is told its run. Ray starts an actor that was killed anew with the arguments it had; whose it is by
then stands in a file beside it, its slot.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from raydist.observe.run_monitor import INTERVAL_S, RunMonitor, placed, start_monitor
from raydist.run.status import this_process

_TAKE_S = 30.0


class WarmMonitor(RunMonitor):
    """A RunMonitor from `take` on. `slot`: the path of a file of its own on this host, which is not there yet."""

    def __init__(self, slot: str) -> None:
        self._slot = Path(slot)
        if self._slot.exists():  # this one stands in for one that was killed
            super().__init__(**json.loads(self._slot.read_text()))

    def take(self, told: Mapping[str, Any]) -> None:
        """It is that run's from now on: `told` has what RunMonitor is made with, plain. Raises what that raises."""
        part = self._slot.with_suffix(".part")
        # For this user alone: a URI in it may hold secrets, and a monitor that stands in for this one must open it.
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(told, file)
        os.replace(part, self._slot)
        super().__init__(**told)


class WarmMonitors:
    """Gives runs their monitors, and keeps one ready for the next run, as long as one is `wanted`. From any thread.

    `folder`: on this host, for the slots; it goes with the last of them.
    """

    def __init__(self, folder: Path, wanted: Callable[[], bool] = lambda: True) -> None:
        self._folder, self._wanted = folder, wanted
        self._lock = threading.Lock()
        self._ready: Any = None
        self._numbers = itertools.count(1)
        self._ended = False

    def prepare(self) -> None:
        """Starts one, unless one is ready or none is wanted. Returns at once."""
        with self._lock:
            if self._ready is None and not self._ended and self._wanted():
                self._folder.mkdir(parents=True, exist_ok=True)
                self._ready = placed(WarmMonitor).remote(str(self._folder / f"{next(self._numbers)}.json"))

    def get(self, run_uri: str, exporters: Sequence[Mapping[str, Any]], spec: Mapping[str, Any]) -> Any:
        """The monitor of that run, as `start_monitor` gives it: the one that is ready, if there is one and it can."""
        import ray
        from ray.exceptions import RayError

        with self._lock:
            ready, self._ready = self._ready, None
        if ready is not None:
            told = {
                "run_uri": run_uri,
                "driver": this_process(),
                "interval_s": INTERVAL_S,
                "exporters": [dict(each) for each in exporters],
                "spec": dict(spec),
            }
            try:
                ray.get(ready.take.remote(told), timeout=_TAKE_S)
                return ready
            except RayError:  # it was killed, or cannot: a new one says why
                ray.kill(ready)
        return start_monitor(run_uri, exporters=exporters, spec=spec)

    def end(self) -> None:
        """No run comes any more: the one that is ready ends. Those of runs end with them."""
        import ray
        from ray.exceptions import RayError

        with self._lock:
            self._ended = True
            ready, self._ready = self._ready, None
        if ready is not None:
            with suppress(RayError):
                ray.kill(ready)
        shutil.rmtree(self._folder, ignore_errors=True)
