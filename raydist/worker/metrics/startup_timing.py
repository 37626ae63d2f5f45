"""Where the time goes between an attempt's begin, or what ended the one before it, and its first step.

Runs in: each train worker; rank 0 tells. Neither torch nor ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

_ORDER = ("schedule", "import", "rendezvous", "build", "load", "first_step")
_AFTER = {"rendezvous": "build", "load": "first_step"}
"""The last stage that is done -> the one that the rank is in, if errors in it are the model's rather than the machines'."""


class Startup:
    """`begun`: Unix time at which the driver began the attempt. `incident`: what it follows, None for a command's first attempt:
    `over`, Unix time at which all ranks had ended; `last_step`, the newest step that anybody had seen done; and where it was a
    failure, `seen`, Unix time, and `silent_s`, how long the guilty rank had shown no progress by then.

    `before`: seconds of what the command did before a first attempt, by stage. `tell(stage)`: is called as each stage begins.

    Times of several hosts are compared: they are as good as the hosts' clocks.
    """

    def __init__(
        self,
        begun: float | None = None,
        incident: Mapping[str, Any] | None = None,
        before: Mapping[str, float] | None = None,
        tell: Callable[[str], None] = lambda stage: None,
    ) -> None:
        self._incident, self._before, self._tell = incident, before, tell
        self._last = time.time() if begun is None else begun
        self._stages: dict[str, float] = {}
        self.doing = ""
        """`build` while the model is imported, built and wrapped, `first_step` until that is done, else empty."""
        if incident is not None:
            if "seen" in incident:
                self._stages["detect"] = incident["silent_s"]
                self._stages["tear_down"] = incident["over"] - incident["seen"]
            self._stages["decide"] = self._last - incident["over"]

    def done(self, stage: str) -> None:
        """`stage` has lasted from the one before until now."""
        now = time.time()
        self._stages[stage] = now - self._last
        self._last = now
        following = _ORDER[_ORDER.index(stage) + 1 :]
        if following:
            self._tell(following[0])
        self.doing = _AFTER.get(stage, "")

    def told(self, resumed: int) -> dict[str, Any]:
        """The event `first_step`: seconds in all and of each stage; steps trained once more, from step `resumed` on."""
        seconds = {stage: round(max(s, 0.0), 3) for stage, s in self._stages.items()}
        repeated = max(self._incident["last_step"] - resumed, 0) if self._incident else 0
        before = {"before": {stage: round(s, 3) for stage, s in self._before.items()}} if self._before else {}
        return {"seconds": round(sum(seconds.values()), 3), "stages": seconds, "repeated_steps": repeated, **before}
