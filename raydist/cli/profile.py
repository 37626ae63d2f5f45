"""`raydist profile`: measures a run that is training, and compares the figures with thresholds.

Runs in: the user's shell. Imports pyarrow and rich inside the command; never ray or torch.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from raydist.cli import options


def profile(
    run: Annotated[str, typer.Argument(help="A run folder's path or URI, or a run's name.", show_default=False)],
    storage: options.Storage = None,
    duration: Annotated[float, typer.Option(min=0.1, help="Seconds to measure.")] = 60.0,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds that one value covers.")] = 10.0,
    metric: Annotated[
        str | None, typer.Option(help="Metrics, separated by commas; docs/reference/thresholds.md lists them.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """Measure a run that is training: mean, minimum and maximum per rank, node and GPU, compared with thresholds."""
    from raydist.report import profile as profiles
    from raydist.run.directory import resolve

    def say(line: str) -> None:
        if not as_json:
            print(line, file=sys.stderr, flush=True)

    names = profiles.chosen(metric.split(",") if metric is not None else None)
    figures = profiles.profile(resolve(run, storage), names, duration, interval, say)
    if as_json:
        print(json.dumps(figures, allow_nan=False))
        return
    from raydist.report import tables

    tables.profile(figures, names)
