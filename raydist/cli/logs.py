"""`raydist logs`: shows what the ranks of a run printed, from the run's folder, during and after training.

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
from raydist.printable import printable

if TYPE_CHECKING:
    from raydist.run.directory import RunDir
    from raydist.run.rank_logs import Reader

POLL_S = 0.5
_NEXT_S, _LATE_S = 1.5, 3.0
"""How long after the end of an attempt, and of a run, lines may still arrive on storage."""


def logs(
    run: Annotated[str, typer.Argument(help="A run folder's path or URI, or a run's name.", show_default=False)],
    storage: options.Storage = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Only lines of this rank.", show_default=False)] = None,
    attempt: Annotated[
        int | None, typer.Option(min=1, help="Lines of this attempt. Default: the newest.", show_default=False)
    ] = None,
    tail: Annotated[
        int | None, typer.Option(min=1, help="Only this many last lines of each rank.", show_default=False)
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing until the run ends, across attempts.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line: attempt, rank, line.")] = False,
) -> None:
    """Show what the ranks of a run printed, stdout and stderr together."""
    from raydist.run.directory import resolve
    from raydist.run.rank_logs import reader as reader_of

    if follow and attempt is not None:
        raise UsageError("--follow and --attempt exclude one another", "--follow begins with the newest attempt")
    place = resolve(run, storage)
    reader = reader_of(place, attempt, rank)
    number = reader.attempt
    out = _Printer(as_json)
    out.all(number, reader, tail, last=not follow)
    if follow:
        _follow(place, reader, out)
    if not out.printed:
        print(f"raydist: {_nothing(place, number, rank)}", file=sys.stderr)


class _Printer:
    def __init__(self, as_json: bool) -> None:
        self._as_json, self.printed = as_json, False

    def all(self, attempt: int, reader: Reader, tail: int | None = None, last: bool = False) -> bool:
        """Prints the new lines; returns whether there were any. `tail`: only this many last lines of each rank."""
        lines = reader.read(last)
        if tail is not None:
            kept: dict[int, deque[str]] = {}
            for rank, line in lines:
                kept.setdefault(rank, deque(maxlen=tail)).append(line)
            lines = ((rank, line) for rank, those in kept.items() for line in those)
        some = False
        for rank, line in lines:
            some = self.printed = True
            record = {"attempt": attempt, "rank": rank, "line": line}
            print(json.dumps(record) if self._as_json else f"[rank {rank}] {printable(line)}")
        sys.stdout.flush()
        return some


def _follow(place: RunDir, reader: Reader, out: _Printer) -> None:
    """Prints new lines until the run has ended and no line has arrived for `_LATE_S`."""
    from raydist.run.log import last_attempt
    from raydist.run.rank_logs import Reader
    from raydist.run.status import read_state

    quiet = 0.0
    while True:
        # Read the status first: lines printed before the run ended are then read once more after it.
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
    """Why there are no lines, and where else to look."""
    from raydist.run.directory import LOGS

    who = "no rank has" if rank is None else f"rank {rank} has not"
    if attempt == 0:
        return f"run {place.name} has not started an attempt: nothing was printed"
    text = f"{who} printed anything in attempt {attempt} of run {place.name}"
    others = sorted(
        {name.split("/")[1] for name in place.storage.files(LOGS, recursive=True)} - {f"attempt-{attempt:04d}"}
    )
    if others:
        text += f"; {place.uri}/{LOGS} also contains {', '.join(others)}"
    return f"{text}; under torchrun, ranks print to its terminal; Ray's own messages are in its logs on the nodes (`ray logs`)"
