"""`raydist trace`: records the next steps of a run that is training, on every rank, in one file.

Runs in: the user's shell, which needs access only to the run's folder. Never imports ray or torch.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from raydist.cli import options, output
from raydist.run.requests import MOST_STEPS


def trace(
    run: Annotated[str, typer.Argument(help="A run folder's path or URI, or a run's name.", show_default=False)],
    storage: options.Storage = None,
    steps: Annotated[int, typer.Option(min=1, max=MOST_STEPS, help="Number of steps to trace.")] = 3,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Also write the trace to this file; compressed if the name ends in .gz."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds to wait for the ranks.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print each rank's shares as one JSON object.")] = False,
) -> None:
    """Trace the next steps of a run that is training, on every rank, into one file for Perfetto or chrome://tracing."""
    from raydist.report import tables
    from raydist.report.tracing import record
    from raydist.run.directory import resolve

    place = resolve(run, storage)
    name, data, shares = record(
        place, steps, timeout, "`raydist trace`", lambda line: print(f"raydist: {line}", file=sys.stderr)
    )
    if out is not None:
        output.write(out, data if out.suffix == ".gz" else gzip.decompress(data))
    if as_json:
        print(json.dumps({**shares, "path": f"{place.uri}/{name}"}, allow_nan=False))
        return
    traced = shares["last_step"] - shares["first_step"] + 1
    less = "" if traced == steps else f" of {steps} requested: the run ended"
    print(
        f"steps {shares['first_step']} to {shares['last_step']}{less}, {len(shares['ranks'])} ranks: {place.uri}/{name}"
    )
    print("open it in https://ui.perfetto.dev or chrome://tracing")
    tables.trace(shares)
