"""A sweep, as its folder has it: its results, its best job and its runs, during and after training.

Runs in: the user's process. Imports pyarrow inside functions; never torch or ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raydist.api import notebook
from raydist.api.runs import STOP_S, Run, Started, place_of

if TYPE_CHECKING:
    import pyarrow as pa

    from raydist.run.sweep_directory import SweepDir  # noqa: F401 - in a base class, as text
    from raydist.spec import JobSpec


class Sweep(Started["SweepDir"]):
    """`raydist.open` and `raydist.sweep` return it. Every call reads the sweep's folder anew; none needs the cluster."""

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

    def report(self, path: str | None = None) -> str:
        """Writes the sweep's page to a path or URI, by default report.html in its folder, and returns where it is."""
        home, name = place_of(path, self.folder.storage)
        home.write(name, page(self.show()))
        return home.at(name).uri

    def wait(self, timeout: float | None = None) -> Sweep:
        """Waits until the driver that this process started has ended. Raises its error, TimeoutError after `timeout` seconds."""
        if self._driver is not None:
            self._driver.wait(timeout)
        return self

    def stop(self, wait: bool = True, timeout: float = STOP_S) -> Sweep:
        """Ends the sweep after one checkpoint of each cell that trains. Raises StopFailed after `timeout` seconds."""
        from raydist.api import stopping

        stopping.stop(self.folder, timeout if wait else None)
        return self

    def delete(self) -> None:
        """Deletes its folder with all its runs. Raises UsageError if it trains."""
        from raydist.api import deleting

        deleting.delete(deleting.chosen_from(self.folder).folder)

    def __repr__(self) -> str:
        return f"<raydist sweep {self.name}: {len(self.folder.cells())} cells, {self.uri}>"

    def _repr_html_(self) -> str:
        return notebook.frame(page(self.show()))


def page(summary: dict[str, Any]) -> bytes:
    """The HTML page about a sweep. `summary`: a result of `Sweep.show`. Raises StorageError."""
    from raydist.report.html.sweep import MOST, render
    from raydist.report.sweep.curves import curves

    return render(summary, curves(summary, MOST))
