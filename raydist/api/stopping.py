"""Stops a run or a sweep after one checkpoint, from any process with access to its folder: the request, the wait, what to tell.

Runs in: the user's process. Never imports ray or torch. The driver finds the request beside its lease (raydist/run/lease.py).
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from raydist.errors import StopFailed, UsageError
from raydist.run.directory import RunDir
from raydist.run.lease import Driver, ask_stop, newest_driver
from raydist.run.status import read_state
from raydist.run.sweep_directory import SweepDir, sweep_of
from raydist.run.sweep_state import fold

POLL_S = 0.5
_RESUME = "the same command resumes it"


def wait(folder: Driven, driver: Driver, timeout: float) -> None:
    """Waits until the driver has ended the run. Raises StopFailed after `timeout` seconds, or if the driver dies before that."""
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


@dataclass(frozen=True)
class Driven:
    """A run or a sweep, with the messages about it."""

    place: RunDir | SweepDir

    def __str__(self) -> str:
        return f"{'run' if self._run else 'sweep'} {self.place.name}"

    @property
    def _run(self) -> RunDir | None:
        return self.place if isinstance(self.place, RunDir) else None

    def refuse_cell(self, driver: Driver | None) -> None:
        """A cell of a sweep has no driver of its own. Raises UsageError."""
        if self._run is not None and driver is None and (sweep := sweep_of(self._run)) is not None:
            raise UsageError(
                f"{self} is a cell of sweep {sweep.name}, and cannot be stopped alone",
                f"`raydist stop {sweep.uri}` ends all its cells",
            )

    def state(self) -> tuple[str, int | None]:
        """Its status, and for a run the newest step."""
        if isinstance(self.place, SweepDir):
            events = [e for e in self.place.events() if e.kind in ("began", "ended")]
            return str(events[-1].data.get("status", "running")) if events else "lost", None
        state = read_state(self.place)
        return str(state["status"]), int(state.get("step") or self.place.newest_step())

    def as_it_is(self) -> str:
        """For a run its step and newest checkpoint, for a sweep the number of cells by status."""
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
            ago = time.time() - driver.renewed_at
            when = f"{ago:.0f} s ago" if ago >= 0 else f"at a time {-ago:.0f} s ahead of this host's clock"
            return (
                f"{self} is not training: its driver, {driver}, last renewed its lease {when} and is considered dead; "
                f"{self.as_it_is()}; {_RESUME}"
            )
        return f"{self} is {status} {self.as_it_is()}: there is nothing to stop"


def stop(place: RunDir | SweepDir, wait_s: float | None, by: str = "raydist.Run.stop") -> None:
    """Asks the driver to end after one checkpoint, and waits at most `wait_s` seconds for that; None: does not wait.

    Does nothing if there is no live driver. Raises UsageError for a cell of a sweep, StopFailed if it has not ended in time.
    """
    folder = Driven(place)
    driver = newest_driver(place)
    folder.refuse_cell(driver)
    if driver is None or not driver.alive:
        return
    ask_stop(place, driver, by)
    if wait_s is not None:
        wait(folder, driver, wait_s)
