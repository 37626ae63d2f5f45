"""Measures how long the whole process was held from outside: by SIGSTOP, a debugger, a freezer, or a machine that was paused.

Runs in: the telemetry thread of each train worker. Neither torch nor ray.

The kernel has no such counter. A thread that sleeps for TICK_S wakes late if its process is held, but also if it waits for a
processor (which /proc counts), for Python's GIL (it then wakes once in each switch interval) or for a page on a disk (a major
fault). What remains is the time that it was held.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time

TICK_S = 0.2
"""Shorter ones cost more: about 0.1 ms of processor time each."""
LEAST_S = 0.05
"""Timers of virtual machines are late by up to some milliseconds."""
_BY_GIL = 0.25
"""If waits for the GIL may explain more than this share of a delay, nothing of it counts."""


def held(late: float, delay: float, switches: int, faults: int) -> float:
    """Seconds that a process was held, from a thread's sleep in it: seconds by which it was `late`, seconds of `delay` without a
    processor, voluntary context switches and major page faults. A hold begins half a tick after the sleep on average."""
    rest = late - delay
    if rest < LEAST_S or faults or switches * sys.getswitchinterval() > _BY_GIL * rest:
        return 0.0
    return rest + TICK_S / 2


class HeldClock:
    """`wait` in place of a wait for an event. Make and use it in one thread. `seconds`: the total; None if the kernel does not
    count the time that a thread waits for a processor."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._fd: int | None = None
        try:
            self._fd = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
            self._delay()
            self.seconds = 0.0
        except (OSError, ValueError, IndexError):
            self.close()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Waits for that time, or until the event is set: whether it is."""
        if self.seconds is None:
            return event.wait(seconds)
        end = time.monotonic() + seconds
        while (left := end - (begun := time.monotonic())) > 0:
            tick = min(left, TICK_S)
            delay, before = self._delay(), resource.getrusage(resource.RUSAGE_THREAD)
            if event.wait(tick):
                return True
            late = time.monotonic() - begun - tick
            if late >= LEAST_S:
                after = resource.getrusage(resource.RUSAGE_THREAD)
                switches, faults = after.ru_nvcsw - before.ru_nvcsw, after.ru_majflt - before.ru_majflt
                self.seconds += held(late, self._delay() - delay, switches, faults)
        return event.is_set()

    def close(self) -> None:
        """Closes its file. May be called again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _delay(self) -> float:
        assert self._fd is not None
        return int(os.pread(self._fd, 100, 0).split()[1]) / 1e9
