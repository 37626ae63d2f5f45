"""`raydist logs`: what the ranks of a run printed, from the run's folder, while it trains and after.

Runs in: the user's shell. Never imports ray or torch.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Annotated

import typer

from raydist.cli import options
from raydist.errors import UsageError

if TYPE_CHECKING:
    from raydist.run.directory import RunDir
    from raydist.run.rank_logs import Reader

POLL_S = 0.5
_NEXT_S, _LATE_S = 1.5, 3.0
"""After an attempt's end, and a run's: how long lines may still be on their way to storage."""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(logs)


def logs(
    run: Annotated[str, typer.Argument(help="A run folder's path or URI, or a run's name.", show_default=False)],
    storage: options.Storage = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Of this rank only.", show_default=False)] = None,
    attempt: Annotated[
        int | None, typer.Option(min=1, help="Of this attempt. Default: the newest.", show_default=False)
    ] = None,
    tail: Annotated[
        int | None, typer.Option(min=1, help="Only the last lines of each rank.", show_default=False)
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run ends, from attempt to attempt.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="An object a line: attempt, rank, line.")] = False,
) -> None:
    """Show what the ranks of a run printed, stdout and stderr together."""
    from raydist.run.directory import resolve
    from raydist.run.log import last_attempt
    from raydist.run.rank_logs import Reader
    from raydist.run.status import read_state

    if follow and attempt is not None:
        raise UsageError("--follow and --attempt exclude one another", "--follow begins with the newest attempt")
    place = resolve(run, storage)
    newest = last_attempt(place)
    number = attempt or newest
    if number > newest:
        raise UsageError(f"run {place.name} has no attempt {number}", f"the newest is {newest}")
    world = read_state(place).get("world_size") if number == newest else None
    if rank is not None and world and rank >= world:
        raise UsageError(f"run {place.name} has no rank {rank}", f"it has {world}, counted from 0")
    out = _Printer(as_json)
    reader = Reader(place, number, rank)
    out.all(number, reader, tail, last=not follow)
    if follow:
        _follow(place, reader, out)
    if not out.printed:
        print(f"raydist: {_nothing(place, number, rank)}", file=sys.stderr)


class _Printer:
    def __init__(self, as_json: bool) -> None:
        self._as_json, self.printed = as_json, False

    def all(self, attempt: int, reader: Reader, tail: int | None = None, last: bool = False) -> bool:
        """Prints what is new; whether there was anything. `tail`: the last lines of each rank."""
        lines = reader.read(last)
        if tail is not None:
            kept: dict[int, deque[str]] = {}
            for rank, line in lines:
                kept.setdefault(rank, deque(maxlen=tail)).append(line)
            lines = ((rank, line) for rank, those in kept.items() for line in those)
        some = False
        for rank, line in lines:
            some = self.printed = True
            told = {"attempt": attempt, "rank": rank, "line": line}
            print(json.dumps(told) if self._as_json else f"[rank {rank}] {line}")
        sys.stdout.flush()
        return some


def _follow(place: RunDir, reader: Reader, out: _Printer) -> None:
    """Until the run has ended and nothing more has come for a moment."""
    from raydist.run.log import last_attempt
    from raydist.run.rank_logs import Reader
    from raydist.run.status import read_state

    quiet = 0.0
    while True:
        # The state first: what was printed before the end is looked for once more after it.
        running = read_state(place)["status"] == "running"
        newest = last_attempt(place)
        if out.all(reader.attempt, reader):
            quiet = 0.0
        elif newest > reader.attempt and quiet >= _NEXT_S:
            out.all(reader.attempt, reader, last=True)
            print(f"raydist: attempt {newest}", file=sys.stderr)
            reader, quiet = Reader(place, newest, reader.rank), 0.0
        elif not running and quiet >= _LATE_S:
            out.all(reader.attempt, reader, last=True)
            return
        time.sleep(POLL_S)
        quiet += POLL_S


def _nothing(place: RunDir, attempt: int, rank: int | None) -> str:
    """Why nothing was shown, and where else to look."""
    from raydist.run.directory import LOGS

    who = "no rank has" if rank is None else f"rank {rank} has not"
    if attempt == 0:
        return f"run {place.name} has not begun an attempt: nothing was printed"
    told = f"{who} printed anything in attempt {attempt} of run {place.name}"
    others = sorted(
        {name.split("/")[1] for name in place.storage.files(LOGS, recursive=True)} - {f"attempt-{attempt:04d}"}
    )
    if others:
        told += f"; {place.uri}/{LOGS} also has {', '.join(others)}"
    return f"{told}; under torchrun ranks print to its terminal, and what Ray itself says is in its logs on the nodes (`ray logs`)"
