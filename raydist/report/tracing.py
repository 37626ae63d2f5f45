"""Waits until every rank has written its part of a trace, and joins the parts: for `raydist trace` and the dashboard.

Runs in: a user's process with access to the run's folder. Never imports ray or torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from raydist.errors import TraceFailed, UsageError
from raydist.report.trace import merge
from raydist.run import requests
from raydist.run.directory import RunDir
from raydist.run.log import read_events
from raydist.run.requests import Request
from raydist.run.status import read_state

POLL_S = 0.5


def record(
    place: RunDir, steps: int, timeout: float, by: str, say: Callable[[str], None]
) -> tuple[str, bytes, dict[str, Any]]:
    """Has the next `steps` steps traced. Returns the name of the trace's file in the run's folder, its content (compressed), and
    the ranks' shares. `by`: who asks; `say` gets a line of progress. Raises UsageError if the run does not train, and TraceFailed.
    """
    status = read_state(place)["status"]
    if status != "running":
        raise UsageError(
            f"run {place.name} is {status}", "only a run that is training can be traced: `raydist runs` lists them"
        )
    request = requests.ask_trace(place, steps, timeout, by)
    try:
        parts = wait(place, request, timeout, say)
    finally:
        requests.withdraw(place, request)
    data, shares = merge(place, parts)
    name = requests.merged_name(request.number)
    place.storage.write(name, data)
    return name, data, shares


def wait(place: RunDir, request: Request, timeout: float, say: Callable[[str], None]) -> list[str]:
    """Waits for all ranks' parts, and returns their names. `timeout`: as given to `ask_trace`. Raises TraceFailed."""
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
