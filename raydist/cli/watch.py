"""`raydist watch`: a live view of a run, from its folder alone.

Runs in: the user's shell. Imports pyarrow and rich inside the command; never ray or torch.
"""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from raydist.cli import options


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(watch)


def watch(
    run: Annotated[str, typer.Argument(help="A run folder's path or URI, or a run's name.", show_default=False)],
    storage: options.Storage = None,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds from one look to the next.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="An object a look, as JSON, a line each.")] = False,
) -> None:
    """Watch a run: its steps, and of each rank memory, computing, exposed communication and waiting for data.

    Ends with the run. Elsewhere than on a terminal it prints a line a look.
    """
    from rich.console import Console
    from rich.live import Live

    from raydist.report import watch as looks
    from raydist.run.directory import resolve

    place = resolve(run, storage)
    console = Console()
    if console.is_terminal and not as_json:
        with Live(looks.panel(seen := looks.view(place)), console=console, auto_refresh=False) as live:
            while seen["status"] == "running":
                time.sleep(every)
                live.update(looks.panel(seen := looks.view(place)), refresh=True)
        return
    while True:
        seen = looks.view(place)
        print(json.dumps(seen, allow_nan=False) if as_json else looks.line(seen), flush=True)
        if seen["status"] != "running":
            return
        time.sleep(every)
