"""`raydist rm`: deletes runs, and sweeps with their cells, after it has listed them and asked for confirmation.

Runs in: the user's shell. Never imports ray or torch.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from raydist.cli import options
from raydist.errors import UsageError


def rm(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...", help="Runs' or sweeps' names, or their folders' paths or URIs.", show_default=False
        ),
    ],
    storage: options.Storage = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was deleted as a JSON list; needs --yes.")
    ] = False,
) -> None:
    """Delete runs, and sweeps with all their cells: records, logs and checkpoints."""
    if as_json and not yes:
        raise UsageError("--json does not ask for confirmation", "give --yes too")
    from raydist.api.deleting import chosen_from, delete
    from raydist.report.text import size
    from raydist.run.sweep_directory import resolve_any

    chosen = [chosen_from(resolve_any(name, storage)) for name in names]
    targets = list({one.folder.uri: one for one in chosen}.values())
    for one in targets:
        if not as_json:
            print(f"{one}: {size(one.bytes)} in {one.files} files: {one.folder.uri}")
            for line in one.stays:
                print(f"  {line}")
    if not yes and not _confirmed(len(targets)):
        print("nothing was deleted")
        return
    for one in targets:
        delete(one.folder)
        if not as_json:
            print(f"deleted {one.folder.uri}")
    if as_json:
        print(
            json.dumps(
                [{"name": o.folder.name, "path": o.folder.uri, "bytes": o.bytes, "files": o.files} for o in targets]
            )
        )


def _confirmed(count: int) -> bool:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("cannot ask for confirmation: this is not a terminal", "give --yes to delete without asking")
    return typer.confirm(f"delete {'it' if count == 1 else f'these {count}'} permanently?")
