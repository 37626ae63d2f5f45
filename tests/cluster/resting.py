"""Actors that rest, and count their naps: found by Ray's workers by PYTHONPATH."""

from __future__ import annotations

import signal
import threading
import time
from types import SimpleNamespace

from raydist.worker import rest


class Threads:
    """An actor whose calls run in threads."""

    def __init__(self) -> None:
        self._naps: list[tuple[float, bool]] = []
        self._napped = threading.Condition()
        rest.time = SimpleNamespace(sleep=self._sleep)  # type: ignore[assignment]

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        with self._napped:
            self._naps.append((seconds, threading.current_thread() is threading.main_thread()))
            self._napped.notify_all()

    def begin(self) -> None:
        rest.begin()

    def end(self) -> None:
        rest.end()

    def naps(self, least: int) -> list[tuple[float, bool]]:
        """Seconds, and whether it was the main thread, of each nap so far; waits until there are so many."""
        with self._napped:
            self._napped.wait_for(lambda: len(self._naps) >= least)
            return list(self._naps)

    def alarm(self) -> float:
        """Seconds until the next one; 0 if none is set."""
        return signal.getitimer(signal.ITIMER_REAL)[0]


class Coroutines(Threads):
    """An actor with an event loop, whose constructor does not run in the main thread."""

    async def begin(self) -> None:  # type: ignore[override]
        rest.begin()

    async def end(self) -> None:  # type: ignore[override]
        rest.end()
