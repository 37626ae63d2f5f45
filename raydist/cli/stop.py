"""`raydist stop`: stops a run or a sweep after one checkpoint, from any shell with access to its folder.

Runs in: the user's shell. Never imports ray or torch. The driver finds the request beside its lease (raydist/run/lease.py).
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from raydist.cli import options
from raydist.errors import StopFailed, UsageError

if TYPE_CHECKING:
    from raydist.run.directory import RunDir
    from raydist.run.lease import Driver
    from raydist.run.sweep_directory import SweepDir

POLL_S = 0.5
_RESUME = "the same command resumes it"


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(stop)


def stop(
    run: Annotated[
        str, typer.Argument(help="A run's or a sweep's name, or its folder's path or URI.", show_default=False)
    ],
    storage: options.Storage = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Send the request and return at once.")] = False,
    timeout: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for the end.")] = 600.0,
    as_json: options.LastJson = False,
) -> None:
    """Stop a run or a sweep after one checkpoint, as Ctrl-C in its shell does. The command that started it resumes it."""
    from raydist.run.lease import ask_stop, newest_driver
    from raydist.run.sweep_directory import resolve_any

    folder = _Folder(resolve_any(run, storage))
    driver = newest_driver(folder.place)
    folder.refuse_cell(driver)
    if driver is None or not driver.alive:
        _print(folder, folder.at_rest(driver), as_json, asked=False, ended=True)
        return
    first = ask_stop(folder.place, driver)
    request = f"asked {driver}" if first else f"{driver} was asked before"
    print(f"raydist: {request} to stop {folder} after one checkpoint", file=sys.stderr)
    if no_wait:
        _print(folder, f"{folder} was asked to stop", as_json, asked=True, ended=False)
        return
    try:
        wait(folder, driver, timeout)
    except KeyboardInterrupt:
        print(f"raydist: {folder} still stops; `raydist runs` shows when it has", file=sys.stderr)
        raise typer.Exit(130) from None
    _print(folder, folder.ended(), as_json, asked=True, ended=True)


def wait(folder: _Folder, driver: Driver, timeout: float) -> None:
    """Waits until the driver has ended the run. Raises StopFailed after `timeout` seconds, or if the driver dies before that."""
    from raydist.run.lease import newest_driver

    deadline = time.monotonic() + timeout
    while True:
        now = newest_driver(folder.place)
        if now is not None and (now.number > driver.number or now.ended):
            return
        if now is not None and not now.alive:
            raise StopFailed(
                f"{folder}: its driver, {driver}, died before it ended the run", f"{folder.as_it_is()}; {_RESUME}"
            )
        if time.monotonic() > deadline:
            raise StopFailed(
                f"{folder} has not ended in {timeout:g} s: {folder.as_it_is()}",
                f"the request stays; wait longer with --timeout, or end {driver} at once with two SIGTERMs",
            )
        time.sleep(POLL_S)


def _print(folder: _Folder, text: str, as_json: bool, *, asked: bool, ended: bool) -> None:
    if as_json:
        status, step = folder.state()
        facts = {"name": folder.place.name, "path": folder.place.uri, "status": status, "step": step}
        print(json.dumps({**facts, "asked": asked, "ended": ended}))
    else:
        print(text)


@dataclass(frozen=True)
class _Folder:
    """A run or a sweep, with the messages about it."""

    place: RunDir | SweepDir

    def __str__(self) -> str:
        return f"{'run' if self._run else 'sweep'} {self.place.name}"

    @property
    def _run(self) -> RunDir | None:
        from raydist.run.directory import RunDir

        return self.place if isinstance(self.place, RunDir) else None

    def refuse_cell(self, driver: Driver | None) -> None:
        """A cell of a sweep has no driver of its own. Raises UsageError."""
        from raydist.run.sweep_directory import sweep_of

        if self._run is not None and driver is None and (sweep := sweep_of(self._run)) is not None:
            raise UsageError(
                f"{self} is a cell of sweep {sweep.name}, and cannot be stopped alone",
                f"`raydist stop {sweep.uri}` ends all its cells",
            )

    def state(self) -> tuple[str, int | None]:
        """Its status, and for a run the newest step."""
        from raydist.run.status import read_state
        from raydist.run.sweep_directory import SweepDir

        if isinstance(self.place, SweepDir):
            events = [e for e in self.place.events() if e.kind in ("began", "ended")]
            return str(events[-1].data.get("status", "running")) if events else "lost", None
        state = read_state(self.place)
        return str(state["status"]), int(state.get("step") or self.place.newest_step())

    def as_it_is(self) -> str:
        """For a run its step and newest checkpoint, for a sweep the number of cells by status."""
        from raydist.run.sweep_directory import SweepDir
        from raydist.run.sweep_state import fold

        if isinstance(self.place, SweepDir):
            events = self.place.events()
            states, cells = fold(events), len(self.place.cells(events))
            counts = Counter(state.status for state in states.values())
            counts["waiting"] = cells - sum(n for status, n in counts.items() if status != "waiting")
            return f"{cells} cells: " + ", ".join(f"{n} {status}" for status, n in counts.items() if n)
        newest = self.place.newest_step()
        return f"at step {self.state()[1]}, " + (
            f"with a checkpoint of step {newest}" if newest else "without a checkpoint"
        )

    def ended(self) -> str:
        """The message for one that has stopped on request."""
        status = self.state()[0]
        return f"{self}: {status} {self.as_it_is()}" + ("" if status == "finished" else f"; {_RESUME}")

    def at_rest(self, driver: Driver | None) -> str:
        """The message for one without a live driver."""
        status = self.state()[0]
        if driver is not None and not driver.ended:
            ago = max(0.0, time.time() - driver.renewed_at)
            return (
                f"{self} is not training: its driver, {driver}, last renewed its lease {ago:.0f} s ago and is considered dead; "
                f"{self.as_it_is()}; {_RESUME}"
            )
        return f"{self} is {status} {self.as_it_is()}: there is nothing to stop"
