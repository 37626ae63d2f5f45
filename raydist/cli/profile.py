"""`raydist profile`: measures a run that is training, and compares the figures with thresholds.

Runs in: the user's shell. Imports pyarrow and rich inside the command; never ray or torch.
"""

from __future__ import annotations

import json
import sys
import time
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
    from raydist.errors import UsageError
    from raydist.report import profile as profiles
    from raydist.run.directory import resolve
    from raydist.run.status import read_state
    from raydist.run.telemetry_log import read_samples

    names = profiles.chosen(metric.split(",") if metric is not None else None)
    place = resolve(run, storage)
    begun = time.time()
    end = time.monotonic() + duration
    while True:
        status = read_state(place)["status"]
        if status != "running":
            raise UsageError(
                f"{place.uri}: this run is {status}; only a run that is training can be profiled",
                f"`raydist show {run}` shows its results",
            )
        left = end - time.monotonic()
        if left <= 0:
            break
        if not as_json:
            print(f"profiling {place.name} for {left:.0f} s more", file=sys.stderr, flush=True)
        time.sleep(min(left, interval))
    rows = read_samples(place, since=begun).to_pylist()
    if not rows:
        raise UsageError(
            f"{place.uri}: nothing was measured in {duration:g} s",
            "set observe.interval_s if it is null; otherwise use a longer --duration",
        )
    figures = profiles.measured(rows, names, begun, interval)
    if as_json:
        print(json.dumps(figures, allow_nan=False))
        return
    from raydist.report import tables

    tables.profile(figures, names)
