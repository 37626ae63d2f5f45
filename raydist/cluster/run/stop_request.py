"""The user's requests to stop a run: a clean stop after a checkpoint, an abort, or the end of this run only.

Runs in: the driver, any thread and signal handlers. Neither torch nor ray.

    set by:   Supervisor: the signal handler, `raydist stop`, and `stop` and `cancel` for a sweep's trial
              Supervisor and Elasticity: `want`, for the ranks only: the head is silent, or the run leaves a node or grows
    read by:  Supervisor (main thread): asks the ranks to stop, aborts at the second signal
              RestartLoop, Elasticity (attempts thread): start no further attempt, end their waits
"""

from __future__ import annotations

import threading
from typing import Literal


class StopRequest:
    """The user's requests are only added. No method takes a lock that another thread holds for long: a signal handler may call all
    of them.
    """

    def __init__(self) -> None:
        self._requests: list[tuple[int, bool]] = []
        self._asked = threading.Event()
        self._reasons: set[str] = set()

    def add(self, signal: int, cancel: bool = False) -> None:
        """One more request, as if that signal had come. `cancel`: the run ends at once, and its workers stay for the next run."""
        self._requests.append((signal, cancel))  # one step, which no other thread or handler sees half done
        self._asked.set()

    @property
    def signals(self) -> tuple[int, ...]:
        """The signals so far, the oldest first."""
        return tuple(signal for signal, _ in self._requests)

    @property
    def cancelled(self) -> bool:
        """Whether the run is to end at once, and its workers stay for the next run."""
        return any(cancel for _, cancel in self._requests)

    def wait(self, seconds: float) -> bool:
        """Waits that long for a first request. Whether there is one."""
        return self._asked.wait(seconds)

    def want(self, why: Literal["head", "resize"], wanted: bool) -> None:
        """Whether the ranks are to end their attempt after a checkpoint for this reason of the driver's own."""
        if wanted:
            self._reasons.add(why)
        else:
            self._reasons.discard(why)

    def command(self) -> str | None:
        """The command for the ranks: "stop", if the user or the driver wants it; None: train on."""
        return "stop" if self._requests or self._reasons else None
