"""`raydist watch`: a live view of a run, from its folder alone.

Runs in: the user's shell. Imports pyarrow and rich inside the command; never ray or torch.
"""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from raydist.cli import options


def watch(
    run: Annotated[str, typer.Argument(help="A run folder's path or URI, or a run's name.", show_default=False)],
    storage: options.Storage = None,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per update, one per line.")] = False,
) -> None:
    """Watch a run: its steps, and each rank's memory, compute time, exposed communication and waits for data.

    Exits when the run ends. If stdout is not a terminal, prints one line per update.
    """
    from rich.console import Console
    from rich.live import Live

    from raydist.report import watch as views
    from raydist.run.directory import resolve

    place = resolve(run, storage)
    console = Console()
    if console.is_terminal and not as_json:
        with Live(views.panel(view := views.view(place)), console=console, auto_refresh=False) as live:
            while view["status"] == "running":
                time.sleep(every)
                live.update(views.panel(view := views.view(place)), refresh=True)
        return
    while True:
        view = views.view(place)
        print(json.dumps(view, allow_nan=False) if as_json else views.line(view), flush=True)
        if view["status"] != "running":
            return
        time.sleep(every)
