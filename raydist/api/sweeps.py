"""A sweep, as its folder has it: its results, its best job and its runs, during and after training.

Runs in: the user's process. Imports pyarrow inside functions; never torch or ray.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydist.api import notebook
from raydist.api.runs import STOP_S, Run, Started, place_of
from raydist.errors import TrainingStopped

if TYPE_CHECKING:
    import pyarrow as pa

    from raydist.run.sweep_directory import SweepDir
    from raydist.spec import JobSpec


class Sweep(Started["SweepDir"]):
    """`raydist.open` and `raydist.sweep` return it. Every call reads the sweep's folder anew; none needs the cluster."""

    _kind = "sweep"

    def show(self) -> dict[str, Any]:
        """What `raydist sweep results --json` prints: points, cells, costs, and what can be concluded."""
        from raydist.report.sweep.results import tell

        return tell(self.folder)

    def results(self) -> pa.Table:
        """One row per point: its parameters, its objective with its interval over seeds, its cost."""
        from raydist.report.sweep.results import table

        return table(self.show())

    def best(self) -> JobSpec:
        """The job of the best cell, ready for `raydist.train`. Raises UsageError if no cell has finished."""
        from raydist.report.sweep.results import best_job

        return best_job(self.folder, self.show())[0]

    @property
    def runs(self) -> dict[str, Run]:
        """The run of each cell that has begun, by the cell's id."""
        runs = {cell.id: self.folder.run(cell.id) for cell in self.folder.cells()}
        return {cell: Run(run) for cell, run in runs.items() if run.exists()}

    def report(self, path: str | Path | None = None) -> str:
        """Writes the sweep's page to a path or URI, by default report.html in its folder, and returns where it is."""
        home, name = place_of(path, self.folder.storage)
        home.write(name, page(self.show()))
        return home.at(name).uri

    def wait(self, timeout: float | None = None) -> Sweep:
        """Waits until no driver trains the sweep. Returns the sweep.

        Raises TrainingStopped if none of its cells has finished, or its driver died; the error of a driver that this process has
        started; TimeoutError after `timeout` seconds.
        """
        self._until_ended(timeout)
        if self._driver is not None:
            self._driver.wait()
            return self
        check_finished(self.folder)
        from raydist.api import stopping
        from raydist.run.lease import newest_driver

        driver, folder = newest_driver(self.folder), stopping.Driven(self.folder)
        if driver is not None and not driver.ended:
            raise TrainingStopped(f"{folder}: its driver died", folder.as_it_is())
        return self

    def stop(self, wait: bool = True, timeout: float = STOP_S) -> Sweep:
        """Ends the sweep after one checkpoint of each cell that trains. Raises StopFailed after `timeout` seconds."""
        self._stop(wait, timeout)
        return self

    def delete(self) -> None:
        """Deletes its folder with all its runs. Raises UsageError if it trains."""
        from raydist.api import deleting

        deleting.delete(deleting.chosen_from(self.folder).folder)

    def __repr__(self) -> str:
        return f"<raydist sweep {self.name}: {len(self.folder.cells())} cells, {self.uri}>"

    def _repr_html_(self) -> str:
        return notebook.frame(page(self.show()))


def check_finished(folder: SweepDir) -> None:
    """Raises TrainingStopped if all cells are done and none of them has finished."""
    from raydist.run.sweep_state import DONE, fold

    events = folder.events()
    states = fold(events)
    cells = [cell.id for cell in folder.cells(events)]
    failed = [cell for cell in cells if cell in states and states[cell].status == "failed"]
    statuses = {states[cell].status if cell in states else "waiting" for cell in cells}
    if failed and statuses <= DONE and "finished" not in statuses:
        cause = " ".join((states[failed[0]].cause or "an unknown cause").split())
        raise TrainingStopped(
            f"sweep {folder.name}: none of its {len(cells):,} cells has finished; {len(failed):,} failed, the first one because of "
            f"{cause}",
            f"details of that one: raydist show {folder.run(failed[0]).uri}; after you fix the cause, start a new sweep with "
            "--name: failed cells are not tried again",
        )


def page(summary: dict[str, Any]) -> bytes:
    """The HTML page about a sweep. `summary`: a result of `Sweep.show`. Raises StorageError."""
    from raydist.report.html.sweep import MOST, render
    from raydist.report.sweep.curves import curves

    return render(summary, curves(summary, MOST))
