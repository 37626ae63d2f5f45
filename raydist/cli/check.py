"""`raydist check`: whether a cluster is fit to train on, before there is a job: each node, each link and the storage.

Runs in: the user's shell, or a Ray job's driver. Imports ray inside the command; never torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from raydist.cli import options


def check(
    spec: Annotated[
        Path | None,
        typer.Argument(
            help="A job file: its cluster.resources, and whether it fits. None is needed.", show_default=False
        ),
    ] = None,
    overrides: options.Overrides = None,
    storage: options.Storage = None,
    address: options.Address = None,
    share: Annotated[
        float, typer.Option("--slow", min=0.01, max=1, help="A node below this share of the median is slow.")
    ] = 0.8,
    exclude_slow: Annotated[
        bool, typer.Option("--exclude-slow", help="Slow nodes are no failure if the job fits on the others.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Measure every node, each link and the storage in about a minute; name the slow nodes. Exits with 3 if there is one."""
    from raydist.api import checking

    result = checking.check.here(
        spec, set=overrides, storage=storage, address=address, slow=share, exclude_slow=exclude_slow
    )
    if as_json:
        print(json.dumps(result))
    else:
        from raydist.report.check import show

        show(result)
    if (result["slow"] and not exclude_slow) or result["differs"]:
        raise typer.Exit(3)
