"""`raydist run`: trains a user's own script, which has a session of raydist.own, on a private Ray or on a cluster.

Runs in: the user's shell, or a Ray job's driver. Imports ray inside the command; never torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raydist.cli import options
from raydist.cli.train import print_end


def run(
    script: Annotated[Path, typer.Argument(help="A Python script with a session of raydist.own.", show_default=False)],
    arguments: options.Arguments = None,
    workers: options.Workers = None,
    cpus: options.Cpus = None,
    gpus: options.Gpus = None,
    overrides: options.Overrides = None,
    name: Annotated[
        str | None,
        typer.Option(
            callback=options.named,
            help="Name of the run; default: the script's. The same name and storage continue it.",
        ),
    ] = None,
    storage: options.Storage = None,
    address: options.Address = None,
    fresh: options.Fresh = False,
    faults: options.Faults = None,
    wait_for_driver: options.WaitForDriver = 0.0,
    dashboard: options.Dashboard = False,
    as_json: options.LastJson = False,
) -> None:
    """Train with a script of your own: its model, its loop. The same command again continues it."""
    from raydist.api import scripts

    ended = scripts.run(
        script, arguments or [], workers=workers, cpus=cpus, gpus=gpus, set=overrides, name=name, storage=storage,
        address=address, fresh=fresh, faults=faults, wait_for_driver=wait_for_driver, dashboard=dashboard,
    )  # fmt: skip
    print_end(ended, as_json)
