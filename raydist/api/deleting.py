"""Deletes runs and sweeps: their records, logs and checkpoints, through no link, and never under a driver.

Runs in: the user's process. Never imports ray or torch.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass

import yaml

from raydist.errors import StorageError, UsageError
from raydist.parsing import parse_yaml
from raydist.printable import printable
from raydist.redact import redact
from raydist.run.directory import DRIVERS, SPEC, RunDir
from raydist.run.lease import DriverLease, newest_driver
from raydist.run.status import read_state
from raydist.run.sweep_directory import BASE, CELLS, SweepDir, sweep_of


@dataclass(frozen=True)
class Chosen:
    """A run or a sweep to delete, the number and bytes of its files, and in `stays` its data on other storage, which is kept."""

    folder: RunDir | SweepDir
    what: str
    files: int
    bytes: int
    stays: tuple[str, ...]

    def __str__(self) -> str:
        return self.what


def chosen_from(folder: RunDir | SweepDir) -> Chosen:
    """That run or sweep, to delete. Raises UserError if it is a link or a cell, or has a driver."""
    local = folder.storage.local
    if local is not None and local.is_symlink():
        raise UsageError(f"{local} is a link to {local.resolve()}", "name that folder, or remove the link by hand")
    driver = newest_driver(folder)
    if isinstance(folder, RunDir):
        if driver is None and (sweep := sweep_of(folder)) is not None:
            raise UsageError(
                f"run {folder.name} is a cell of sweep {sweep.name}",
                f"`raydist rm {sweep.uri}` deletes the sweep with all its cells",
            )
        status = read_state(folder)["status"]
        what, trains = (
            f"run {folder.name} ({status}, step {folder.newest_step()})",
            driver is None and status == "running",
        )
    else:
        what, trains = f"sweep {folder.name} ({len(folder.cells())} cells)", False
    if trains or (driver is not None and driver.alive):
        by = f", driven by {driver}" if driver is not None else ""
        raise UsageError(f"{what.partition(' (')[0]} is running{by}", f"stop it first: raydist stop {folder.uri}")
    files, count = _measure(folder)
    return Chosen(folder, what, files, count, _stays(folder))


def _measure(folder: RunDir | SweepDir) -> tuple[int, int]:
    """Number of files, and bytes. Targets of links are not counted: they are not deleted."""
    if (local := folder.storage.local) is None:
        sizes = folder.storage.files(recursive=True, unfinished=True)
        return len(sizes), sum(sizes.values())
    files = count = 0
    for where, _, names in os.walk(local):
        for name in names:
            with suppress(FileNotFoundError):
                files, count = files + 1, count + os.lstat(os.path.join(where, name)).st_size
    return files, count


def _stays(folder: RunDir | SweepDir) -> tuple[str, ...]:
    """One line per storage that keeps copies of its checkpoints."""
    try:
        spec = parse_yaml(folder.storage.read(SPEC if isinstance(folder, RunDir) else BASE))
        replicas = list((spec.get("checkpoint") or {}).get("replicas") or [])
    except (OSError, AttributeError, TypeError, ValueError, yaml.YAMLError):
        return ()
    return tuple(printable(f"copies of its checkpoints in {redact(str(replica))} are kept") for replica in replicas)


def delete(folder: RunDir | SweepDir) -> None:
    """Deletes the folder. The lease prevents training. The files that identify it go last, so a second call can complete it."""
    storage = folder.storage
    with DriverLease(RunDir(storage)):
        for name in [*storage.folders(), *storage.files(unfinished=True)]:
            if name not in (DRIVERS, SPEC, CELLS):
                _remove(folder, name)
    _remove(folder, "")


def _remove(folder: RunDir | SweepDir, name: str) -> None:
    local = folder.storage.local
    if local is None:
        folder.storage.delete(name)
        return
    path = local / name
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)  # removes links, and never follows them
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"cannot delete {path}: {error.strerror or error}", "") from error
