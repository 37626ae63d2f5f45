"""`raydist report`: writes one HTML page about a run, from the run's folder alone.

Runs in: the user's shell. Imports pyarrow and numpy inside the command; never ray or torch.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from raydist.cli import options


def report(
    run: Annotated[str, typer.Argument(help="A run folder's path or URI, or a run's name.", show_default=False)],
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", help="Path or URI of the page. Default: report.html in the run's folder."),
    ] = None,
    storage: options.Storage = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the page's figures as one JSON object.")] = False,
) -> None:
    """Write one offline HTML page about a run, also while it trains: losses, time, memory, slow ranks, incidents."""
    from raydist.api.runs import Run
    from raydist.run.directory import resolve

    made = Run(resolve(run, storage))
    where, figures = made.write_page(out)
    print(json.dumps({**figures.facts, "report": where}, allow_nan=False) if as_json else where)
