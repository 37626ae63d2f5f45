"""`raydist stop`: stops a run or a sweep after one checkpoint, from any shell with access to its folder.

Runs in: the user's shell. Never imports ray or torch. The driver finds the request beside its lease (raydist/run/lease.py).
"""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from raydist.cli import options


def stop(
    run: Annotated[
        str, typer.Argument(help="A run's or a sweep's name, or its folder's path or URI.", show_default=False)
    ],
    storage: options.Storage = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Send the request and return at once.")] = False,
    timeout: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for the end.")] = 600.0,
    as_json: options.LastJson = False,
) -> None:
    """Stop a run or a sweep after one checkpoint, as Ctrl-C in its shell does. The command that started it resumes it."""
    from raydist.api.stopping import Driven
    from raydist.api.stopping import stop as ask
    from raydist.run.sweep_directory import resolve_any

    folder = Driven(resolve_any(run, storage))
    try:
        made = ask(
            folder,
            None if no_wait else timeout,
            "`raydist stop`",
            lambda line: print(f"raydist: {line}", file=sys.stderr),
        )
    except KeyboardInterrupt:
        print(f"raydist: {folder} is still stopping; check with `raydist runs`", file=sys.stderr)
        raise typer.Exit(130) from None
    if not as_json:
        print(made.text)
        return
    status, step = folder.state()
    facts = {"name": folder.place.name, "path": folder.place.uri, "status": status, "step": step}
    print(json.dumps({**facts, "asked": made.asked, "ended": made.ended}))
