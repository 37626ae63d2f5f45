"""Trains the cells of `raydist sweep FILE`, on a private Ray or on a cluster.

Runs in: the user's shell, or a Ray job's driver. Imports ray inside functions; never torch.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from raydist.cli.place import where
from raydist.cli.train import run_logs
from raydist.run.sweep_directory import SweepDir
from raydist.run.sweep_state import DONE, fold
from raydist.storage import Storage

if TYPE_CHECKING:
    from raydist.records import Event
    from raydist.spec.sweep import Cell, Sweep


def train_cells(
    sweep: Sweep, cells: Sequence[Cell], home: str, address: str | None, wait_for_driver: float = 0.0
) -> tuple[SweepDir, int]:
    """Trains the cells that are not done yet, each as its own run in HOME/NAME/runs. `home`: the folder that contains the sweep.

    For a search that chooses its cells, `cells` is empty: earlier choices are read from the folder.

    Returns the sweep's folder and the exit code: 0, or 130 or 143 if it was interrupted. Raises UserError if another driver runs
    the sweep, or it cannot run here.
    """
    from raydist.cluster.run.request import worker_env
    from raydist.cluster.session import open_session
    from raydist.cluster.sweep.result_export import ResultExport
    from raydist.cluster.sweep.search import Search, require
    from raydist.cluster.sweep.sweep import SweepRun
    from raydist.cluster.sweep.trial_setup import Datasets, TrialSetup
    from raydist.observe.sweep_results import choose
    from raydist.report.preparing import data_progress
    from raydist.report.sweep.standing import Standing
    from raydist.report.sweeplive import SweepConsole
    from raydist.run.directory import RunDir
    from raydist.run.lease import DriverLease
    from raydist.spec.sweep import check, store

    check(sweep, cells)
    able = [cell for cell in sweep.scouts() if not cell.problems] if sweep.spec.search.chooses else cells
    if sweep.spec.search.chooses:
        require(sweep.spec.search)
    folder = SweepDir(Storage(home).at(sweep.name))
    datasets = Datasets(home, data_progress)
    cwd, limits = Path.cwd(), sweep.spec.limits
    own_code = any(cell.job.own_code() for cell in able)
    place = where(address)
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
            open_session(
                place,
                env=worker_env(able[0].job),
                log_dir=log_dir,
                python_path=[str(cwd)] if place == "local" else [],
                working_dir=cwd if own_code else None,
                ranks=True,
            ) as session,
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
    return folder, 130 if ended.signal == signal.SIGINT else 143
