"""Whether Ray's head has stopped answering for so long that the run must checkpoint, or end.

Runs in: the driver. Never imports torch or ray. The supervisor's main thread calls `look`; the restart loop reads `ending`.
A run on a private Ray has no HeadMonitor: its head ends with the driver.
"""

from __future__ import annotations

from typing import Literal

from raydist.cluster.head_monitor import HeadMonitor
from raydist.cluster.run.request import Ending
from raydist.run.directory import RunDir


class HeadOutage:
    """`limit_s`: recovery.head_timeout. After half of it the ranks save a checkpoint, after all of it the run ends."""

    def __init__(self, head: HeadMonitor | None, limit_s: float, run: RunDir) -> None:
        self._head, self._limit_s, self._run = head, limit_s, run
        self.silent = False
        """Whether the head was silent when `look` was last called. Only `look` sets it."""

    @property
    def address(self) -> str:
        """HOST:PORT of the head; "" for a private Ray."""
        return self._head.address if self._head is not None else ""

    def look(self) -> Literal["same", "silent", "answers", "gone"]:
        """What has changed since the last call. "gone": the head has been silent for longer than the limit."""
        if self._head is None:
            return "same"
        before, seconds = self.silent, self._head.silent_s
        self.silent = seconds > self._limit_s / 2
        if seconds > self._limit_s:
            return "gone"
        if self.silent == before:
            return "same"
        return "silent" if self.silent else "answers"

    def ending(self) -> Ending | None:
        """The run's ending while the head is silent; None while it answers."""
        if self._head is None or not self.silent:
            return None
        seconds = self._head.silent_s
        where = f"Ray's head at {self._head.address}"
        cause = f"{where} has not answered for {seconds:.0f} s; once it does, run the same command again to continue"
        return Ending("stopped", self._run.newest_step(), cause=cause)

    def close(self) -> None:
        """Ends the HeadMonitor's thread."""
        if self._head is not None:
            self._head.close()
