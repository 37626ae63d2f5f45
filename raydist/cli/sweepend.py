"""How `raydist sweep FILE` ends: the table and what it says, the page, the cells that failed, and the exit code.

Runs in: the user's shell, or a Ray job's driver. Must not import ray or torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from raydist.errors import TrainingStopped
from raydist.run.directory import REPORT
from raydist.run.sweep_directory import RESULTS, SweepDir
from raydist.run.sweep_state import DONE, fold

_NAMED = 10
"""Failed cells that are named at the end; `raydist sweep results` has all of them."""


def finish(folder: SweepDir, code: int, as_json: bool) -> int:
    """Shows what the sweep has come to, and writes its page and results.parquet. `code`: 0, or that of a signal.

    Returns the command's exit code: `code`. Raises TrainingStopped where every cell is done and none of them has finished, and
    UsageError where none has reported the objective.
    """
    from raydist.report.sweep import tables
    from raydist.report.sweep.results import tell, write_parquet

    told = tell(folder)
    _tried(RESULTS, lambda: write_parquet(folder, told))
    if as_json:
        print(json.dumps(told, allow_nan=False))
    else:
        tables.results(told, failures=False)  # they come last
    if _tried(REPORT, lambda: write_page(folder, told)):
        print(f"the whole on one page: {folder.storage.at(REPORT).uri}", file=sys.stderr)
    sys.stdout.flush()
    _failures(folder, code)
    return code


def page(folder: SweepDir, told: dict[str, Any]) -> bytes:
    """The page about the sweep that `results.tell` has told. Raises StorageError."""
    from raydist.report.html.sweep import MOST, render
    from raydist.report.sweep.curves import curves

    return render(told, curves(told, MOST))


def write_page(folder: SweepDir, told: dict[str, Any]) -> None:
    """Writes it as report.html into the sweep's folder. Raises StorageError."""
    folder.storage.write(REPORT, page(folder, told))


def _tried(name: str, write: Callable[[], None]) -> bool:
    """Whether it could be written. A sweep that has trained does not fail because of what is told about it."""
    try:
        write()
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        print(f"raydist: {name} is as it was: {type(error).__name__}: {line}", file=sys.stderr)
        return False
    return True


def _failures(folder: SweepDir, code: int) -> None:
    """Says on stderr which cells have failed, and why. Raises TrainingStopped if nothing else has come of the sweep."""
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
            f"sweep {folder.name}: none of its {len(cells):,} cells has finished; {len(failed):,} failed, the first one of "
            f"{cause}",
            f"the whole story of that one: raydist show {folder.run(first).uri}; once it is mended, begin anew with --name: cells "
            "that have failed are not tried again",
        )
    print(f"{len(failed):,} of {len(cells):,} cells failed:", file=sys.stderr)
    for cell, why in list(failed.items())[:_NAMED]:
        print(f"  {cell}: {why}", file=sys.stderr)
    if len(failed) > _NAMED:
        print(f"  and {len(failed) - _NAMED:,} more: raydist sweep results {folder.uri}", file=sys.stderr)


def _line(cause: str | None) -> str:
    return " ".join((cause or "a cause that is not known").split())
