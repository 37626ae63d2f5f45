"""The end of `raydist sweep FILE`: the table with its conclusions, the page, the failed cells, and the exit code.

Runs in: the user's shell, or a Ray job's driver. Must not import ray or torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from raydist.api.sweeps import page
from raydist.errors import TrainingStopped
from raydist.run.directory import REPORT
from raydist.run.sweep_directory import RESULTS, SweepDir
from raydist.run.sweep_state import DONE, fold

_NAMED = 10
"""Failed cells listed at the end; `raydist sweep results` lists all of them."""


def finish(folder: SweepDir, code: int, as_json: bool) -> int:
    """Shows the results of the sweep, and writes its page and results.parquet. Returns `code`: 0, or the exit code of a signal.

    Raises TrainingStopped if every cell is done and none of them has finished, and UsageError if none has reported the objective.
    """
    from raydist.report.sweep import tables
    from raydist.report.sweep.results import tell, write_parquet

    summary = tell(folder)
    _written(RESULTS, lambda: write_parquet(folder, summary))
    if as_json:
        print(json.dumps(summary, allow_nan=False))
    else:
        tables.results(summary, failures=False)  # they are printed last
    if _written(REPORT, lambda: folder.storage.write(REPORT, page(summary))):
        print(f"all results on one page: {folder.storage.at(REPORT).uri}", file=sys.stderr)
    sys.stdout.flush()
    _report_failures(folder, code)
    return code


def _written(name: str, write: Callable[[], None]) -> bool:
    """Whether the file could be written. A sweep that has trained does not fail because of its reports."""
    try:
        write()
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        print(f"raydist: {name} was not updated: {type(error).__name__}: {line}", file=sys.stderr)
        return False
    return True


def _report_failures(folder: SweepDir, code: int) -> None:
    """Prints the failed cells and their causes on stderr. Raises TrainingStopped if all cells are done and none has finished."""
    events = folder.events()
    states = fold(events)
    cells = [cell.id for cell in folder.cells(events)]
    failed = {cell: _line(states[cell].cause) for cell in cells if cell in states and states[cell].status == "failed"}
    if not failed:
        return
    statuses = {states[cell].status if cell in states else "waiting" for cell in cells}
    first, cause = next(iter(failed.items()))
    if code == 0 and statuses <= DONE and "finished" not in statuses:
        raise TrainingStopped(
            f"sweep {folder.name}: none of its {len(cells):,} cells has finished; {len(failed):,} failed, the first one because of "
            f"{cause}",
            f"details of that one: raydist show {folder.run(first).uri}; after you fix the cause, start a new sweep with --name: "
            "failed cells are not tried again",
        )
    print(f"{len(failed):,} of {len(cells):,} cells failed:", file=sys.stderr)
    for cell, why in list(failed.items())[:_NAMED]:
        print(f"  {cell}: {why}", file=sys.stderr)
    if len(failed) > _NAMED:
        print(f"  and {len(failed) - _NAMED:,} more: raydist sweep results {folder.uri}", file=sys.stderr)


def _line(cause: str | None) -> str:
    return " ".join((cause or "an unknown cause").split())
