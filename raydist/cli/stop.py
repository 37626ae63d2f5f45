"""`raydist stop`: stops a run or a sweep after one checkpoint, from any shell with access to its folder.

Runs in: the user's shell. Never imports ray or torch. The driver finds the request beside its lease (raydist/run/lease.py).
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from raydist.cli import options

if TYPE_CHECKING:
    from raydist.api.stopping import Driven


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
    from raydist.api.stopping import Driven, wait
    from raydist.run.lease import ask_stop, newest_driver
    from raydist.run.sweep_directory import resolve_any

    folder = Driven(resolve_any(run, storage))
    driver = newest_driver(folder.place)
    folder.refuse_cell(driver)
    if driver is None or not driver.alive:
        _print(folder, folder.at_rest(driver), as_json, asked=False, ended=True)
        return
    first = ask_stop(folder.place, driver)
    request = f"asked {driver}" if first else f"{driver} was asked before"
    print(f"raydist: {request} to stop {folder} after one checkpoint", file=sys.stderr)
    if no_wait:
        _print(folder, f"{folder} was asked to stop", as_json, asked=True, ended=False)
        return
    try:
        wait(folder, driver, timeout)
    except KeyboardInterrupt:
        print(f"raydist: {folder} is still stopping; check with `raydist runs`", file=sys.stderr)
        raise typer.Exit(130) from None
    _print(folder, folder.ended(), as_json, asked=True, ended=True)


def _print(folder: Driven, text: str, as_json: bool, *, asked: bool, ended: bool) -> None:
    if as_json:
        status, step = folder.state()
        facts = {"name": folder.place.name, "path": folder.place.uri, "status": status, "step": step}
        print(json.dumps({**facts, "asked": asked, "ended": ended}))
    else:
        print(text)
