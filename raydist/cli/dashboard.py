"""`raydist dashboard`: serves live pages of the runs and sweeps of one or more storages.

Runs in: the user's shell. Imports starlette, uvicorn and pyarrow inside the command; never ray or torch.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

PORT = 8275


def dashboard(
    storages: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[STORAGE]...",
            help="Folders or URIs that hold runs. Default: RAYDIST_STORAGE, config.toml, the nearest runs/, or ~/raydist.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; another one lets other machines connect.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = PORT,
    allow_actions: Annotated[
        bool, typer.Option("--allow-actions", help="Pages may stop a run, have it save a checkpoint, or trace it.")
    ] = False,
) -> None:
    """Serve live pages of runs and sweeps to your browser, from their folders alone, until Ctrl-C.

    Prints the URL to open. Anyone with this URL can see the runs, so do not share it. Changes nothing, except for the requests that
    --allow-actions allows.
    """
    import asyncio

    from raydist.dashboard.access import AccessPolicy
    from raydist.dashboard.announced import announced
    from raydist.dashboard.server import listener, serve
    from raydist.errors import UsageError
    from raydist.run.storage_choice import choose
    from raydist.storage import Storage

    choices = [choose(given) for given in storages] if storages else [choose()]
    homes = [Storage(choice.uri) for choice in choices]
    for home, choice in zip(homes, choices, strict=True):
        if not home.is_folder():
            what = "is no folder" if home.exists() else "does not exist"
            raise UsageError(f"storage {home.uri} ({choice.because}) {what}", "name a folder or URI that holds runs")
    with listener(host, port) as listening:
        access = AccessPolicy(host, listening.getsockname()[1], acts=allow_actions)

        def ready() -> None:
            print(access.url(), flush=True)
            print("open this address in a browser; Ctrl-C ends the server", file=sys.stderr)

        with announced(homes, access.address):
            asyncio.run(serve(homes, listening, access, ready))
