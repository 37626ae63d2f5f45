"""Shows what `raydist train` does before its first step: a spinner on a terminal, one line per stage elsewhere; on stderr.

Runs in: the driver. Must not import torch or ray.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console as Rich
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

REFRESH_HZ = 8.0
_WORDS = {
    "job": "reading the job",
    "data": "opening the data",
    "run": "opening the run",
    "ray": "starting Ray",
    "check": "checking the cluster",
    "workers": "starting the workers",
    "import": "importing torch on the workers",
    "rendezvous": "connecting the workers",
    "build": "building the model",
    "load": "looking for a saved state",
    "first_step": "training begins",
}
"""Stages in order: the driver's, then those of raydist/worker/metrics/startup_timing.py."""


def process_start() -> float:
    """Unix time at which this process began, to about 10 ms; the current time if /proc does not contain it."""
    with suppress(OSError, AttributeError, ValueError, IndexError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - max(age, 0.0)
    return time.time()


class Starting:
    """`with Starting() as starting:`, then `stage(name)` as each begins. On a terminal the display can be hidden and shown again.

    `begun`: Unix time at which the user's wait began; default: the start of this process, so that imports count.
    """

    def __init__(
        self,
        begun: float | None = None,
        tty: bool | None = None,
        stream: IO[str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.begun = process_start() if begun is None else begun
        self._clock = clock
        self._stream = stream or cast("IO[str]", Stderr())
        self._rich = Rich(file=self._stream, force_terminal=tty, highlight=False)
        self.tty = self._rich.is_terminal if tty is None else tty
        self._marks: list[tuple[str, float]] = []
        self._words = "starting"
        self._shown = 0
        self._spinner = Spinner("dots", style="cyan")
        self._live: Live | None = None

    def __enter__(self) -> Starting:
        return self

    def __exit__(self, *error: object) -> None:
        self.hide()

    def stage(self, name: str, words: str | None = None) -> None:
        """Begins the driver's stage `name`, which ends the previous one."""
        now = self._clock()
        self._marks.append((name, now if self._marks else self.begun))
        self._say(words or _WORDS[name], now)
        if self.tty and self._live is None:
            self._live = Live(
                console=self._rich,
                get_renderable=self.line,
                refresh_per_second=REFRESH_HZ,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start(refresh=True)

    def ranks(self, stages: Sequence[Sequence[Any]]) -> None:
        """Shows the stages that the ranks of the current attempt have begun so far, each as (name, Unix time)."""
        if len(stages) < self._shown:  # of a new attempt
            self._shown = 0
        for name, at in stages[self._shown :]:
            self._say(_WORDS.get(name, name), at)
        self._shown = len(stages)

    def note(self, line: str) -> None:
        """Prints a permanent line."""
        self._rich.print(Text(line), soft_wrap=True)

    def hide(self) -> None:
        """Removes the spinner, to make room for other output; the next `stage` shows it again. A second call does nothing."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def line(self) -> Spinner:
        """The spinner, the current stage and the seconds since the command began."""
        waited = max(self._clock() - self.begun, 0.0)
        self._spinner.update(text=Text.assemble(self._words, (f"  {waited:.1f} s", "dim")))
        return self._spinner

    def seconds(self, until: float) -> dict[str, float]:
        """Seconds of each of the driver's stages, the last one until that Unix time. They add up to the whole wait."""
        ends = [*(at for _, at in self._marks[1:]), until]
        return {name: max(end - at, 0.0) for (name, at), end in zip(self._marks, ends, strict=True)}

    def _say(self, words: str, at: float) -> None:
        self._words = words
        if not self.tty:
            print(f"[{max(at - self.begun, 0.0):5.1f} s] {words}", file=self._stream, flush=True)


class Stderr:
    """Writes to the current sys.stderr: a Ray session replaces it, perhaps while another thread draws."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        """Writes. Text is lost if the stream is being replaced at that moment."""
        with suppress(OSError, ValueError):
            return sys.stderr.write(text)
        return 0

    def flush(self) -> None:
        """Flushes."""
        with suppress(OSError, ValueError):
            sys.stderr.flush()

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return sys.stderr.isatty()

    def fileno(self) -> int:
        """Its descriptor."""
        return sys.stderr.fileno()
