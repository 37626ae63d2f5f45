"""The live display of `raydist train`: a panel on a terminal, plain lines elsewhere. All output goes to stderr.

Runs in: the driver's main thread. Must not import torch or ray.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from rich.console import Console as Rich
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raydist.records import Event
from raydist.report import text
from raydist.report.starting import REFRESH_HZ, Starting
from raydist.run.directory import RunDir

LINE_EVERY_S = 5.0
REFRESH_S = 0.25
_STYLES = {
    "fault": "magenta",
    "failure": "bold red",
    "checkpoint_failed": "red",
    "checkpoint_rejected": "red",
    "checkpoint_damaged": "red",
    "replica_failed": "red",
    "decision": "yellow",
    "ended": "bold",
}
_SILENT = {"workers", "replica_saved", "experts", "expert_loads"}
"""Kinds of events that the display shows in another way or that are too frequent; `raydist show` has them."""


def panel(
    snapshot: dict[str, Any], total_steps: int | None, name: str, path: str, waiting: RenderableType | None = None
) -> RenderableType:
    """The panel for one snapshot of the run's monitor. `waiting`: shown until there is a step."""
    step = snapshot["step"]
    head = Table.grid(padding=(0, 1), expand=True)
    head.add_column(no_wrap=True)
    head.add_column(ratio=1)
    head.add_column(no_wrap=True, justify="right")
    share = f"{step / total_steps:.0%}" if total_steps else ""
    # Without a known end there is no share to draw.
    bar: RenderableType = ProgressBar(total=total_steps, completed=step) if total_steps else ""
    head.add_row(Text(text.progress(step, total_steps), style="bold"), bar, share)

    live: RenderableType = Text("   ").join(
        Text.assemble((f"{label} ", "dim"), value) for label, value in text.figures(snapshot, total_steps).items()
    )
    if not snapshot.get("record"):
        live = live or waiting or Text("waiting for the first step", style="dim")
    tail = [
        Text(
            "no checkpoint yet"
            if not snapshot.get("checkpoint")
            else f"checkpoint at step {snapshot['checkpoint']['step']}"
        )
    ]
    if snapshot.get("failures"):
        tail.append(
            Text(f"{snapshot['failures']} failed attempt{'s' if snapshot['failures'] != 1 else ''}", style="yellow")
        )
    if snapshot.get("command") == "stop":
        tail.append(Text("stopping after a checkpoint", style="yellow"))
    if snapshot.get("storage_error"):
        tail.append(Text(f"records wait for storage: {snapshot['storage_error']}", style="red"))
    size = snapshot["world_size"]
    ranks = f" · {size} worker{'s' if size != 1 else ''}" if size else ""
    title = f"{name} · {snapshot['status']} · attempt {snapshot['attempt']}{ranks}"
    body = Group(head, live, Text("   ").join(tail))
    return Panel(body, title=Text(title), title_align="left", subtitle=Text(path, style="dim"), subtitle_align="left")


class Console:
    """The display of one run; a context manager. `tty`: True: a panel, False: lines, None: a panel if `stream` is a terminal.

    On a terminal the panel is drawn at most 4 times per second. Elsewhere a line is printed for the first step, then every
    5 s, and for the last step. Events are printed at once in both.
    """

    def __init__(
        self,
        total_steps: int | None,
        run: RunDir,
        tty: bool | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        starting: Starting | None = None,
    ) -> None:
        self._starting = starting
        self._total, self._run, self._clock = total_steps, run, clock
        self._stream = stream or sys.stderr
        self._rich = Rich(file=self._stream, force_terminal=tty, highlight=False)
        self._tty = self._rich.is_terminal if tty is None else tty
        self._live: Live | None = None
        self._snapshot: dict[str, Any] | None = None
        self._drawn_at: float | None = None
        self._printed_step: int | None = None
        self._trace = ""

    def __enter__(self) -> Console:
        if not self._tty:
            self._say(f"run {self._run.name}: {self._run.uri}")
        elif self._starting is None:
            self._live = self._begin()
        else:
            self._starting.hide()
            self._live = self._begin(self._waiting)
        return self

    def _begin(self, moving: Callable[[], RenderableType] | None = None) -> Live:
        """A live display. `moving`: rendered several times per second, and erased at the end; None: it shows what it is passed."""
        live = Live(
            console=self._rich,
            get_renderable=moving,
            auto_refresh=moving is not None,
            refresh_per_second=REFRESH_HZ,
            transient=moving is not None,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        live.start(refresh=moving is not None)
        return live

    def _waiting(self) -> RenderableType:
        """Shown before the first step: the stage, inside the panel once there is a snapshot of an attempt."""
        assert self._starting is not None
        line = self._starting.line()
        if self._snapshot is None or not self._snapshot["attempt"]:
            return line
        return panel(self._snapshot, self._total, self._run.name, self._run.uri, line)

    def _started(self) -> None:
        """From now on the display is drawn only on new data: a spinner would take CPU time from the ranks."""
        if self._starting is not None:
            if self._live is not None:
                self._live.stop()  # which draws once more
                self._live = self._begin()
            self._starting = None

    def __exit__(self, *error: object) -> None:
        self._started()
        if self._snapshot is not None:
            self._draw(self._snapshot)
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, snapshot: dict[str, Any]) -> None:
        """Shows a `RunMonitor.snapshot()`. May be called at any rate; it does not print the snapshot's events."""
        self._snapshot = snapshot
        if self._starting is not None:
            self._starting.ranks(snapshot["stages"])
            if not snapshot.get("record"):
                return
            self._started()
        if not self._tty and not snapshot.get("record"):
            return
        if self._drawn_at is None or self._clock() - self._drawn_at >= (REFRESH_S if self._tty else LINE_EVERY_S):
            self._draw(snapshot)

    def event(self, event: Event) -> None:
        """Prints an event at once."""
        if event.kind in _SILENT:
            return
        self._say(text.event(event), _STYLES.get(event.kind, ""))
        trace = str(event.data.get("traceback") or "").rstrip() if event.kind == "failure" else ""
        if trace:
            # In a crash loop, the traceback is printed once.
            self._say(trace if trace != self._trace else "(the same traceback)", "dim")
            self._trace = trace

    def note(self, line: str) -> None:
        """Prints a line that is not an event of the run."""
        self._say(line, "yellow")

    def _draw(self, snapshot: dict[str, Any]) -> None:
        if self._live is not None:
            self._live.update(panel(snapshot, self._total, self._run.name, self._run.uri), refresh=True)
        elif snapshot.get("record") and snapshot["step"] != self._printed_step:
            self._say(text.line(snapshot, self._total))
            self._printed_step = snapshot["step"]
        self._drawn_at = self._clock()

    def _say(self, line: str, style: str = "") -> None:
        if self._live is not None:
            self._rich.print(Text(line, style=style))
        else:
            # Not through rich: without a terminal it would still wrap lines.
            print(line, file=self._stream, flush=True)
