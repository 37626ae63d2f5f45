"""What tells whether a folder has changed, without reading its files: their names, sizes and times.

Runs anywhere. Raises StorageError.
"""

from __future__ import annotations

from typing import Any

from raydist.run.directory import CHECKPOINTS, EVENTS, METRICS, SAMPLES, SPEC, STATE, RunDir
from raydist.run.lease import driven_since
from raydist.run.status import read_state
from raydist.run.sweep_directory import EVENTS as SWEEP_EVENTS
from raydist.run.sweep_directory import RUNS, SweepDir
from raydist.storage import Storage


def of_run(run: RunDir) -> Any:
    """Changes with the heartbeat of a run that trains, and with its status: a run is lost without a change of any file."""
    files = run.storage.files
    return (
        read_state(run)["status"],
        _times(run.storage, STATE, EVENTS, SPEC),
        files(METRICS),
        files(SAMPLES),
        run.storage.folders(CHECKPOINTS),
    )


def of_sweep(sweep: SweepDir) -> Any:
    """Changes with its events, with its driver, and with each of its runs that trains."""
    cells = sweep.storage.folders(RUNS)
    return (
        driven_since(sweep),
        sweep.storage.files(SWEEP_EVENTS),
        [_times(sweep.storage, f"{RUNS}/{cell}/{STATE}") for cell in cells],
    )


def _times(storage: Storage, *names: str) -> Any:
    return [(info.size, info.mtime) for info in storage.fs.get_file_info([storage.path(name) for name in names])]
