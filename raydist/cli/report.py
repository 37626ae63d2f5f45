"""`raydist report`: a run in one file for a browser, from its folder alone.

Runs in: the user's shell. Imports pyarrow and numpy inside the command; never ray or torch.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from raydist.cli import options


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(report)


def report(
    run: Annotated[str, typer.Argument(help="A run folder's path or URI, or a run's name.", show_default=False)],
    out: Annotated[
        str | None,
        typer.Option(
            "--out", "-o", help="Where the page goes, a path or URI. Default: report.html in the run's folder."
        ),
    ] = None,
    storage: options.Storage = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures behind the page, as one object.")] = False,
) -> None:
    """Write a page about a run, live or over: one offline file. Losses, where the time went, memory, slow ranks, incidents."""
    from raydist.errors import UsageError
    from raydist.report import run_metrics
    from raydist.report.html import run as pages
    from raydist.run.directory import REPORT, resolve
    from raydist.storage import Storage

    place = resolve(run, storage)
    home, name = place.storage, REPORT
    if out is not None:
        path, mark, query = out.partition("?") if "://" in out else (out, "", "")
        folder, slash, name = path.rpartition("/")
        home = Storage(f"{folder or slash or '.'}{mark}{query}")
        if not name or (home.exists(name) and home.size(name) is None):
            raise UsageError(f"-o {out} is a folder", f"name a file in it, such as {path.rstrip('/')}/{REPORT}")
    found = run_metrics.report(place)
    home.write(name, pages.render(found))
    where = home.at(name).uri
    print(json.dumps({**found.told, "report": where}, allow_nan=False) if as_json else where)
