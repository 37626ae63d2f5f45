"""`raydist.train`, `raydist.run_script`, `raydist.sweep`, `raydist.open` and `raydist.list_runs`.

Runs in: the user's process. A run's driver is a process of its own (call.py), so that nothing here imports ray. It calls the same
function as the command: `train` in training.py, `run` in scripts.py, `train` in sweep_training.py.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from raydist.api.call import Call, check_numbers
from raydist.api.runs import POLL_S, Run
from raydist.api.sweeps import Sweep
from raydist.errors import UsageError
from raydist.printable import printable
from raydist.run.directory import Folder, RunDir, check_name, default_storage
from raydist.storage import Storage

if TYPE_CHECKING:
    from raydist.spec.load import Job

_Made = TypeVar("_Made", Run, Sweep)
_PATH = threading.Lock()
"""Of the working directory's place in sys.path: only one call at a time puts it there, and takes it away."""


def train(
    spec: Job,
    *,
    set: Mapping[str, Any] | None = None,
    deepspeed: str | Path | None = None,
    name: str | None = None,
    storage: str | None = None,
    address: str | None = None,
    until: int | None = None,
    resume: bool = False,
    fresh: bool = False,
    allow_spec_change: bool = False,
    faults: str | Path | None = None,
    wait_for_driver: float = 0.0,
    wait_for_nodes: float = 0.0,
    exclude_slow: bool = False,
    dashboard: bool = False,
    wait: bool = True,
) -> Run:
    """Trains a job, as `raydist train` does, and returns its run. The same call again resumes it.

    `spec`: a YAML file, its content as a dict, or a JobSpec; `set`: dotted field -> value. The other arguments are the command's
    options. With `wait` it returns when the run has ended, and the run ends, after a checkpoint, if this process does; a
    KeyboardInterrupt stops it in the same way. Without, it returns once the run's driver has taken it; the run then goes on
    whatever happens to this process, until `Run.stop`. `dashboard` serves the run's live page to this machine meanwhile, and prints
    its address on stderr, so it needs `wait`.

    Raises SpecError for a wrong job, other UserErrors if it cannot be trained here, and TrainingStopped with its root cause if it
    ended before its last step.
    """
    arguments = {argument: value for argument, value in locals().items() if argument != "wait"}
    from raydist.spec import load

    _check_dashboard(dashboard, wait)
    check_numbers(until=(until, 1), wait_for_driver=(wait_for_driver, 0), wait_for_nodes=(wait_for_nodes, 0))
    with own_code():
        job = load(spec, set or {}, deepspeed, warn=lambda line: None)  # the driver prints it
    folder = RunDir(Storage(storage or default_storage()).at(check_name(name or job.name)))
    before = _number(folder)
    run = Run(folder, Call("raydist.api.training:call", arguments, tied=wait))
    return run.wait() if wait else _taken(run, before)


def run_script(
    script: str | Path,
    arguments: Sequence[object] = (),
    *,
    workers: int = 1,
    cpus: float | None = None,
    gpus: float | None = None,
    set: Mapping[str, Any] | None = None,
    name: str | None = None,
    storage: str | None = None,
    address: str | None = None,
    fresh: bool = False,
    faults: str | Path | None = None,
    wait_for_driver: float = 0.0,
    dashboard: bool = False,
    wait: bool = True,
) -> Run:
    """Trains with a script that has a session of raydist.own, as `raydist run` does, and returns its run. The same call again
    continues it.

    `arguments`: the script's; `workers`: its ranks, each with `cpus` and `gpus`; `set`: dotted field of the run's job -> value. The
    others are as for `train`. Raises UserErrors if it cannot be trained here, and TrainingStopped with its root cause, such as the
    script's line, if it ended before its last step.
    """
    _check_file("script", script)
    arguments = [str(each) for each in arguments]
    given = {argument: value for argument, value in locals().items() if argument != "wait"}
    _check_dashboard(dashboard, wait)
    check_numbers(workers=(workers, 1), gpus=(gpus, 0), wait_for_driver=(wait_for_driver, 0))
    folder = RunDir(Storage(storage or default_storage()).at(check_name(name or Path(script).stem)))
    before = _number(folder)
    run = Run(folder, Call("raydist.api.scripts:call", given, tied=wait))
    return run.wait() if wait else _taken(run, before)


def sweep(
    spec: str | Path,
    *,
    set: Mapping[str, Any] | None = None,
    name: str | None = None,
    storage: str | None = None,
    address: str | None = None,
    wait_for_driver: float = 0.0,
    wait: bool = True,
) -> Sweep:
    """Trains a sweep's cells, as `raydist sweep` does, and returns it. The same call again resumes it.

    `spec`: the sweep's YAML file; `set`: dotted field of the base job -> value; `wait`: as for `train`. Raises SpecError for a
    wrong file, other UserErrors if it cannot be trained here, TrainingStopped if none of its cells has finished.
    """
    arguments = {argument: value for argument, value in locals().items() if argument != "wait"}
    from raydist.run.sweep_directory import SweepDir
    from raydist.spec.sweep import load_sweep

    _check_file("sweep", spec)
    check_numbers(wait_for_driver=(wait_for_driver, 0))
    with own_code():
        asked = load_sweep(spec, set or {}, check_name(name) if name else None)
    folder = SweepDir(Storage(storage or default_storage()).at(asked.name))
    before = _number(folder)
    made = Sweep(folder, Call("raydist.api.sweep_training:train", arguments, tied=wait))
    return made.wait() if wait else _taken(made, before)


def open(run: str | Path, storage: str | None = None) -> Run | Sweep:
    """The run or the sweep of that folder, URI, or name in `storage`. Raises RunNotFound."""
    from raydist.run.sweep_directory import resolve_any

    found = resolve_any(str(run), storage)
    return Run(found) if isinstance(found, RunDir) else Sweep(found)


def list_runs(storage: str | None = None) -> list[dict[str, Any]]:
    """What `raydist runs --json` prints: name, path, status, step and losses of each run in `storage`."""
    from raydist.report import summary

    return list(printable(summary.runs(storage)))


@contextmanager
def own_code() -> Iterator[None]:
    """The user's own code is found in the working directory, too, where the command looks: Python looks beside the script only."""
    with _PATH:
        here = os.getcwd()
        if added := here not in sys.path and "" not in sys.path:
            sys.path.append(here)
        try:
            yield
        finally:
            if added:
                sys.path.remove(here)


def _check_file(what: str, given: object) -> None:
    if not isinstance(given, str | Path):
        raise UsageError(f"{what}: {given!r:.60} is not the name of a file", "give a path")


def _check_dashboard(dashboard: bool, wait: bool) -> None:
    if dashboard and not wait:
        raise UsageError(
            "dashboard=True with wait=False: the address of the page would be printed nowhere",
            "leave out one of them; `raydist dashboard STORAGE` shows the run, too",
        )


def _number(folder: Folder) -> int:
    from raydist.run.lease import newest_driver

    driver = newest_driver(folder)
    return driver.number if driver is not None else 0


def _taken(made: _Made, before: int) -> _Made:
    """Waits until the driver has taken the run and written what it trains, or has ended. Raises its error."""
    while not made.ended():
        if _number(made.folder) > before and made.folder.exists():
            return made
        time.sleep(POLL_S)
    return made.wait()
