"""Whether Ray's head has stopped answering for so long that the run must checkpoint, or end.

Runs in: the driver. Never imports torch; only `look_for_another` asks Ray. The supervisor's main thread calls `look`; the restart
loop reads `ending`.
"""

from __future__ import annotations

from typing import Literal

from raydist.cluster import nodes
from raydist.cluster.head_monitor import HeadMonitor, answers
from raydist.cluster.private_head import PrivateHead
from raydist.cluster.run.request import Ending
from raydist.run.directory import RunDir

ASKED_S = 10.0
"""How long a run that was asked to stop waits for a head that is silent."""


class HeadOutage:
    """`limit_s`: recovery.head_timeout. After half of it the ranks save a checkpoint, after all of it the run ends. `head`: of a
    cluster, or of a private Ray; None: nothing is watched.
    """

    def __init__(self, head: HeadMonitor | PrivateHead | None, limit_s: float, run: RunDir) -> None:
        self._head, self._limit_s, self._run = head, limit_s, run
        self.silent = False
        """Whether the head was silent when `look` was last called. Only `look` sets it."""

    @property
    def address(self) -> str:
        """HOST:PORT of the head."""
        return self._head.address if self._head is not None else ""

    @property
    def dead(self) -> bool:
        """Whether the head does not come back."""
        return self._head is not None and self._head.dead

    @property
    def cut_off(self) -> bool:
        """Whether no actor can be called any more. Those of a cluster whose head was started again may live for a while."""
        return isinstance(self._head, PrivateHead) and self._head.dead and not self._head.patience_s

    def look(self, asked: bool = False) -> Literal["same", "silent", "answers", "gone"]:
        """What has changed since the last call. "gone": the head has been silent for longer than the limit. `asked`: the user has
        asked the run to stop.
        """
        if self._head is None:
            return "same"
        before, seconds, dead = self.silent, self._head.silent_s, self._head.dead
        limit = self._head.patience_s if dead else min(self._limit_s, ASKED_S) if asked else self._limit_s
        self.silent = dead or seconds > limit / 2
        if seconds > limit:
            return "gone"
        if self.silent == before:
            return "same"
        return "silent" if self.silent else "answers"

    def ending(self) -> Ending | None:
        """The run's ending while the head is silent; None while it answers."""
        if self._head is None or not self.silent:
            return None
        then = "run the same command again to continue"
        if isinstance(self._head, HeadMonitor) and not self._head.dead:
            then = f"once it does, {then}, with another --address if it has moved"
        cause = f"{self._head.why(self._head.silent_s)}; {then}"
        return Ending("stopped", self._run.newest_step(), cause=cause)

    def look_for_another(self) -> bool:
        """Whether the head was started again, as another cluster: the run's actors end then. From any thread."""
        if isinstance(self._head, HeadMonitor) and answers(self._head.address) and nodes.head_replaced():
            self._head.replace()
        return isinstance(self._head, HeadMonitor) and self._head.dead

    def replaced(self) -> None:
        """The head was started again, as another cluster. From any thread."""
        if isinstance(self._head, HeadMonitor):
            self._head.replace()

    def why(self) -> str:
        """What is wrong with the head, now."""
        return self._head.why(self._head.silent_s) if self._head is not None else ""

    def end_monitors(self) -> None:
        """If a private Ray is dead: returns when none of its monitors can write any more."""
        if isinstance(self._head, PrivateHead) and self._head.dead:
            self._head.end_monitors()

    def close(self) -> None:
        """Ends the HeadMonitor's thread."""
        if self._head is not None:
            self._head.close()
