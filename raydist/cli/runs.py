"""`raydist runs` and `raydist show`: lists runs and shows one, from their folders alone.

Runs in: the user's shell. Imports pyarrow and rich inside the commands; never ray or torch.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from raydist.cli import options


def runs(
    storage: options.Storage = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the runs of a storage."""
    from raydist.api import start

    rows = start.list_runs(storage)
    if as_json:
        print(json.dumps(rows, allow_nan=False))
        return
    from raydist.report import tables
    from raydist.run.directory import elsewhere
    from raydist.run.storage_choice import choose, how_to_set
    from raydist.storage import Storage

    choice = choose(storage)
    tables.runs(rows, Storage(choice.uri).uri, choice.because, elsewhere(choice) if not rows else how_to_set())


def show(
    run: Annotated[str, typer.Argument(help="A run folder's path or URI, or a run's name.", show_default=False)],
    storage: options.Storage = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; with --steps, one per line.")] = False,
    steps: Annotated[bool, typer.Option("--steps", help="Show every step instead of the summary.")] = False,
) -> None:
    """Show a run: status, losses, attempts, checkpoints, workers."""
    from raydist.api.runs import Run
    from raydist.report import summary
    from raydist.run.directory import resolve
    from raydist.run.log import SINGLE

    place = Run(resolve(run, storage))
    if steps:
        if as_json:
            for row in summary.steps(place.folder):
                print(json.dumps(row, allow_nan=False))
            return
        from raydist.report import tables

        tables.steps(summary.steps(place.folder, SINGLE))
        return
    facts = place.show()
    if as_json:
        print(json.dumps(facts, allow_nan=False))
        return
    from raydist.report import tables

    tables.show(facts)
