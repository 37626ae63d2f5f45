"""`raydist trace`: records the next steps of a run that is training, on every rank, in one file.

Runs in: the user's shell, which needs access only to the run's folder. Never imports ray or torch.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raydist.cli import options, output
from raydist.errors import TraceFailed, UsageError
from raydist.run.requests import MOST_STEPS

if TYPE_CHECKING:
    from raydist.run.directory import RunDir
    from raydist.run.requests import TraceRequest

POLL_S = 0.5


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(trace)


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
    from raydist.report.trace import merge
    from raydist.run import requests
    from raydist.run.directory import resolve
    from raydist.run.status import read_state

    place = resolve(run, storage)
    status = read_state(place)["status"]
    if status != "running":
        raise UsageError(
            f"run {place.name} is {status}", "only a run that is training can be traced: `raydist runs` lists them"
        )
    request = requests.ask_trace(place, steps, timeout)
    try:
        parts = wait(place, request, timeout, lambda line: print(f"raydist: {line}", file=sys.stderr))
    finally:
        requests.withdraw(place, request.number)
    data, shares = merge(place, parts)
    name = requests.merged_name(request.number)
    place.storage.write(name, data)
    if out is not None:
        output.write(out, data if out.suffix == ".gz" else gzip.decompress(data))
    if as_json:
        print(json.dumps({**shares, "path": f"{place.uri}/{name}"}, allow_nan=False))
        return
    traced = shares["last_step"] - shares["first_step"] + 1
    less = "" if traced == request.steps else f" of {request.steps} requested: the run ended"
    print(
        f"steps {shares['first_step']} to {shares['last_step']}{less}, {len(shares['ranks'])} ranks: {place.uri}/{name}"
    )
    print("open it in https://ui.perfetto.dev or chrome://tracing")
    tables.trace(shares)


def wait(place: RunDir, request: TraceRequest, timeout: float, say: Callable[[str], None]) -> list[str]:
    """Waits for all ranks' parts, and returns their names. `timeout`: as given to `ask_trace`. Raises TraceFailed."""
    from raydist.run import requests
    from raydist.run.log import read_events
    from raydist.run.status import read_state

    ask_again = f"try again: raydist trace {place.uri} --steps {request.steps}"
    shown = ""
    while True:
        # Read the status first: once a run has ended, no part of its trace is written any more.
        status = read_state(place)["status"]
        late = time.time() > request.until
        parts, missing = requests.parts(place, request.number)
        if parts and not missing:
            return parts
        events = [e for e in read_events(place) if e.data.get("trace") == request.number]
        started = [e.data for e in events if e.kind == "trace_started"]
        failed = [e.data for e in events if e.kind == "trace_failed"]
        if failed and failed[-1]["cause"] != "the attempt ended":
            raise TraceFailed(f"rank {failed[-1]['rank']} could not be traced: {failed[-1]['cause']}", ask_again)
        if started:
            first, ranks = started[-1]["first_step"], started[-1]["world_size"]
            line = f"tracing {request.steps} steps from step {first} on {ranks} ranks"
            silent = missing or list(range(ranks))
            problem = f"no trace from rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent[:8]))}"
        else:
            line = problem = f"run {place.name} has not started the trace"
        if status != "running":
            raise TraceFailed(
                f"run {place.name} is now {status}; {problem}", "only a run that is training can be traced"
            )
        if late:
            raise TraceFailed(f"{problem} in {timeout:g} s", "its steps may take longer: increase --timeout")
        if line != shown:
            say(line)
            shown = line
        time.sleep(POLL_S)
