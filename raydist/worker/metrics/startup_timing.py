"""The time from the start of an attempt, or from the failure before it, to its first step, by stage.

Runs in: each train worker; rank 0 reports it. `waited` runs in its agent. Neither torch nor ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

_ORDER = ("schedule", "import", "rendezvous", "build", "load", "first_step")
_AFTER = {"rendezvous": "build", "load": "first_step"}
"""The last completed stage -> the current one, if errors in it are caused by the model rather than by machines."""

WRONG_S = 60.0
"""A clock that differs by less from the driver's counts as right: an order may take so long."""


def waited(begun: float, known_s: float) -> float:
    """Seconds since `begun`, Unix time of the driver's host. `known_s`: those until the coordinator, there, gave the order, which
    are all that is known if one of the two hosts has a wrong clock.
    """
    seconds = time.time() - begun
    return seconds if abs(seconds - known_s) <= WRONG_S else known_s


class Startup:
    """`begun`: when the driver started the attempt, by this host's monotonic clock, which does not jump. `incident`: why the
    attempt before it ended, None for a command's first attempt: `over`, Unix time at which all ranks had exited; `next`, at which
    this attempt was started; `last_step`, the newest completed step that was seen; after a failure also `seen`, at which it was
    detected, and `silent_s`, seconds without progress of the failed rank by then. These times are of the driver's host.

    `before`: seconds of the command's stages before a first attempt. `tell(stage)` is called when a stage begins.
    """

    def __init__(
        self,
        begun: float | None = None,
        incident: Mapping[str, Any] | None = None,
        before: Mapping[str, float] | None = None,
        tell: Callable[[str], None] = lambda stage: None,
    ) -> None:
        self._incident, self._before, self._tell = incident, before, tell
        self._last = time.monotonic() if begun is None else begun
        self._stages: dict[str, float] = {}
        self.doing = ""
        """`build` while the model is imported, built and wrapped; `first_step` during the first step; else empty."""
        if incident is not None:
            if "seen" in incident:
                self._stages["detect"] = incident["silent_s"]
                self._stages["tear_down"] = incident["over"] - incident["seen"]
            self._stages["decide"] = incident["next"] - incident["over"]

    def done(self, stage: str) -> None:
        """`stage` is complete: it began when the one before it was."""
        now = time.monotonic()
        self._stages[stage] = now - self._last
        self._last = now
        following = _ORDER[_ORDER.index(stage) + 1 :]
        if following:
            self._tell(following[0])
        self.doing = _AFTER.get(stage, "")

    def first_step_data(self, resumed: int, steps_per_epoch: int = 0) -> dict[str, Any]:
        """The data of the event `first_step`: seconds in total and by stage, and repeated steps after step `resumed`.
        `steps_per_epoch`: 0 if it is not known."""
        seconds = {stage: round(max(s, 0.0), 3) for stage, s in self._stages.items()}
        repeated = max(self._incident["last_step"] - resumed, 0) if self._incident else 0
        before = {"before": {stage: round(s, 3) for stage, s in self._before.items()}} if self._before else {}
        data = {"seconds": round(sum(seconds.values()), 3), "stages": seconds, "repeated_steps": repeated}
        return {**data, "steps_per_epoch": steps_per_epoch or None, **before}
