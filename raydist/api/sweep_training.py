"""Trains the cells of a sweep, on a private Ray or on a cluster: what `raydist sweep FILE` and the process of `raydist.sweep` do.

Runs in: the driver. Imports ray inside functions; never torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydist.api.sweeps import check_finished, page
from raydist.api.training import run_logs
from raydist.run.directory import REPORT, default_storage
from raydist.run.sweep_directory import RESULTS, SweepDir
from raydist.run.sweep_state import DONE, fold
from raydist.storage import Storage

if TYPE_CHECKING:
    from raydist.records import Event
    from raydist.spec.load import Overrides
    from raydist.spec.sweep import Cell, Sweep

_NAMED = 10
"""Failed cells listed at the end; `raydist sweep results` lists all of them."""


def train(
    spec: str | Path, *, set: Overrides | None, name: str | None, storage: str | None, address: str | None, wait_for_driver: float,
    show: Callable[[dict[str, Any]], None] = lambda summary: None,
) -> int:  # fmt: skip
    """Trains a sweep: see `raydist.sweep`, and its errors. `show` gets its results. Returns the exit code: 0, or 129, 130 or
    143 if a signal interrupted it."""
    from raydist.spec.sweep import load_sweep

    sweep = load_sweep(spec, set or (), name)
    return finish(*train_cells(sweep, sweep.cells(), storage or default_storage(), address, wait_for_driver), show)


def check_cells(sweep: Sweep, cells: Sequence[Cell]) -> None:
    """Raises SpecError with all problems of the cells, UserError if what searches for them is not installed."""
    from raydist.spec.sweep import check

    check(sweep, cells)
    if sweep.spec.search.chooses:
        from raydist.cluster.sweep.search import require

        require(sweep.spec.search)


def train_cells(
    sweep: Sweep, cells: Sequence[Cell], home: str, address: str | None, wait_for_driver: float = 0.0
) -> tuple[SweepDir, int]:
    """Trains the cells that are not done yet, each as its own run in HOME/NAME/runs. `home`: the folder that contains the sweep.

    For a search that chooses its cells, `cells` is empty: earlier choices are read from the folder.

    Returns the sweep's folder and the exit code: 0, or 129, 130 or 143 if it was interrupted. Raises UserError if another driver
    runs the sweep, or it cannot run here.
    """
    from raydist.cluster.place import session_of, where
    from raydist.cluster.sweep.result_export import ResultExport
    from raydist.cluster.sweep.search import Search
    from raydist.cluster.sweep.sweep import SweepRun
    from raydist.cluster.sweep.trial_setup import Datasets, TrialSetup
    from raydist.observe.sweep_results import choose
    from raydist.report.preparing import data_progress
    from raydist.report.sweep.standing import Standing
    from raydist.report.sweeplive import SweepConsole
    from raydist.run.directory import RunDir
    from raydist.run.lease import DriverLease
    from raydist.spec.sweep import store

    check_cells(sweep, cells)
    able = [cell for cell in sweep.scouts() if not cell.problems] if sweep.spec.search.chooses else cells
    folder = SweepDir(Storage(home).at(sweep.name))
    datasets = Datasets(home, data_progress)
    limits = sweep.spec.limits
    own_code = any(cell.job.own_code() for cell in able)
    rows = ResultExport(
        folder, choose([e.model_dump() for e in sweep.base.observe.exporters], folder), sweep.spec.objective.metric
    )
    standing = Standing(sweep.spec.objective.metric, sweep.spec.objective.better)

    def on_event(event: Event) -> None:
        rows.add(event)
        standing.add(event)

    with DriverLease(RunDir(folder.storage), wait_s=wait_for_driver) as lease, closing(rows):
        store(folder, sweep, cells)
        events = folder.events()
        search = Search(sweep, events) if sweep.spec.search.chooses else None
        if search is not None:
            cells = search.cells
        notes = folder.cells(events)
        rows.begin(notes, events)
        standing.begin(notes, events)
        states = fold(events)
        done = all(cell.id in states and states[cell.id].status in DONE for cell in cells)
        if done and (search is None or search.over):
            return folder, 0
        datasets.of(able[0].job)
        with (
            run_logs(RunDir(folder.storage)) as log_dir,
            session_of(able[0].job, where(address), log_dir, own_code=own_code, ranks=True) as session,
        ):
            known = cells if search is None else [*(cell for cell in cells if not cell.problems), *able]
            plans = TrialSetup(known, folder, datasets, session, sweep.spec.array.concurrent)
            with SweepConsole(sweep.name, limits.cost_per_gpu_hour, standing) as console:
                ended = SweepRun(
                    sweep.spec,
                    sweep.axes,
                    folder,
                    {cell.id: cell.parameters for cell in cells},
                    plans,
                    session,
                    console,
                    tokens=plans.tokens,
                    at_once=plans.at_once,
                    room=None if session.private else plans.room,
                    search=search,
                    keep=plans.add,
                    lost=lease.lost,
                    asked=lease.asked_to_stop,
                    on_event=on_event,
                ).run()
    if ended.status == "paused":
        print(f"paused: {ended.because}; the same command resumes it", file=sys.stderr)
    if ended.signal is None:
        return folder, 0
    print("interrupted; the same command resumes it", file=sys.stderr)
    return folder, 128 + ended.signal


def finish(folder: SweepDir, code: int, show: Callable[[dict[str, Any]], None]) -> int:
    """Gives the results of the sweep to `show`, writes its page and results.parquet, and prints the failed cells on stderr. Returns
    `code`: 0, or the exit code of a signal.

    Raises TrainingStopped if every cell is done and none of them has finished, and UsageError if none has reported the objective.
    """
    from raydist.report.sweep.results import tell, write_parquet

    summary = tell(folder)
    _written(RESULTS, lambda: write_parquet(folder, summary))
    show(summary)
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
    """Prints the failed cells and their causes on stderr. `code`: 0 if no signal ended the sweep. Raises TrainingStopped if all
    cells are done and none has finished."""
    if code == 0:
        check_finished(folder)
    events = folder.events()
    states = fold(events)
    cells = [cell.id for cell in folder.cells(events)]
    failed = {cell: _line(states[cell].cause) for cell in cells if cell in states and states[cell].status == "failed"}
    if not failed:
        return
    print(f"{len(failed):,} of {len(cells):,} cells failed:", file=sys.stderr)
    for cell, why in list(failed.items())[:_NAMED]:
        print(f"  {cell}: {why}", file=sys.stderr)
    if len(failed) > _NAMED:
        print(f"  and {len(failed) - _NAMED:,} more: raydist sweep results {folder.uri}", file=sys.stderr)


def _line(cause: str | None) -> str:
    return " ".join((cause or "an unknown cause").split())
