"""A user's own script as a rank of `raydist run`: executes it, and holds what its session needs of the rank.

Runs in: the rank's process, called by rank_main.py. Imports neither torch nor ray: the agent imports this, too. The session
(raydist/own) reads `current`.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from raydist.errors import TrainingStopped, UserError

if TYPE_CHECKING:
    from raydist.ipc.heartbeat import Heartbeat
    from raydist.worker.attempt import Job, Outcome
    from raydist.worker.distributed import Rank
    from raydist.worker.metrics.reporter import Reporter
    from raydist.worker.metrics.startup_timing import Startup
    from raydist.worker.metrics.telemetry import Telemetry


@dataclass(slots=True)
class ScriptRank:
    """One attempt of this rank: its process group is started, and its telemetry runs. `outcome`: set by the session at its end."""

    job: Job
    rank: Rank
    reporter: Reporter | None
    heartbeat: Heartbeat
    startup: Startup
    telemetry: Telemetry
    outcome: Outcome | None = None


current: ScriptRank | None = None
"""Of this process; None if `raydist run` has not started it."""


@dataclass(frozen=True, slots=True)
class Script:
    """`path`: of the script, absolute or relative to the working directory. `folder`: to work in; None: where the process is."""

    path: str
    arguments: Sequence[str] = field(default_factory=tuple)
    folder: str | None = None

    def run(self, here: ScriptRank) -> Outcome:
        """Executes the script as `python` does. Returns the outcome of its session.

        Raises what the script raises, UserError if it had no session, and TrainingStopped if it hides how that ended.
        """
        global current
        if self.folder is not None:
            os.chdir(self.folder)
        sys.argv = [self.path, *self.arguments]
        sys.path.insert(0, str(Path(self.path).parent.resolve()))
        current = here
        try:
            runpy.run_path(self.path, run_name="__main__")
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise
        if here.outcome is None:
            raise UserError(
                f"{self.path}: it ended without a session",
                "open one in it: `with rd.session(...) as s` (docs/how-to/own-loop.md), or start it with torchrun",
            )
        if here.outcome.status == "stopped":
            raise TrainingStopped(
                f"{self.path}: it has caught the error that ended its session", "let the error end the script"
            )
        return here.outcome

    def place(self, error: BaseException) -> str:
        """The line of the script that raised: `train.py, line 12`; "" if none did."""
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == self.path]
        return f"{Path(self.path).name}, line {lines[-1]}" if lines else ""
