"""Passes a rank's newest telemetry row to its node's monitor: a small file in memory, replaced as a whole.

The rank writes, the monitor of its node reads; neither waits for the other, and either may die. Runs in: each train worker, and
the readers. Neither torch nor ray.

    /dev/shm/raydist-<uid>-board-<run>/<node>-<rank>.json      of one run on this host; mode 0700
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from raydist.private_files import is_private_folder, make_private_folder

SHM = Path("/dev/shm")
STALE_S = 600.0
"""Mailboxes not written for this long, whose ranks have exited, belong to runs whose processes were all killed."""
INJECTED = "injected"
PRIVATE = ("pid", "gpu_uuid", "monotonic", INJECTED)
"""Columns of a row in addition to those of raydist.run.telemetry_schema: the rank's pid, torch's UUID of its GPU, the host's
monotonic clock, and what the fault `reading` says."""


def folder(run_uri: str) -> Path:
    """The run's folder on this host; the same for all processes that use this URI."""
    return _root() / f"{_prefix()}{xxhash.xxh64_hexdigest(run_uri.encode())[:12]}"


def _root() -> Path:
    return SHM if SHM.is_dir() else Path(tempfile.gettempdir())


def _prefix() -> str:
    return f"raydist-{os.getuid()}-board-"


def file_of(run_uri: str, node: str, rank: int) -> Path:
    """The file of that rank. `node`: the IP address of its node in the cluster."""
    return folder(run_uri) / f"{node}-{rank:05d}.json"


def delete(path: Path) -> None:
    """Deletes the file of a rank, which has exited; and the folder, if it is empty."""
    for each in (path, path.with_suffix(".tmp")):
        with suppress(OSError):
            each.unlink(missing_ok=True)
    with suppress(OSError):
        path.parent.rmdir()


class Mailbox:
    """The rank's side. `node`: the IP address of its node in the cluster."""

    def __init__(self, run_uri: str, node: str, rank: int) -> None:
        """Raises OSError if the folder cannot be created, or belongs to another user."""
        self._path = file_of(run_uri, node, rank)
        self._make()

    def _make(self) -> None:
        make_private_folder(self._path.parent)

    def write(self, row: Mapping[str, Any]) -> None:
        """Replaces the rank's row. `row`: columns of raydist.run.telemetry_schema, at least `rank`, and of PRIVATE, at least `pid`
        and `monotonic`. Raises OSError.
        """
        temporary = self._path.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(row))
        except FileNotFoundError:  # the last rank that closed has deleted the folder
            self._make()
            temporary.write_text(json.dumps(row))
        temporary.replace(self._path)

    def close(self) -> None:
        """Deletes the rank's file; and the folder, if it is empty."""
        delete(self._path)


def read(run_uri: str, node: str) -> Iterator[dict[str, Any]]:
    """The newest row of each rank of this run on that node. Files that are being created or deleted are skipped."""
    place = folder(run_uri)
    for path in sorted(place.glob(f"{node}-*.json")) if is_private_folder(place) else ():
        with suppress(OSError, ValueError):
            yield json.loads(path.read_text())


def clear(run_uri: str, node: str) -> None:
    """Deletes the files of this run's ranks on that node, including killed ones."""
    place = folder(run_uri)
    if not is_private_folder(place):
        return
    for path in [*place.glob(f"{node}-*.json"), *place.glob(f"{node}-*.tmp")]:
        with suppress(OSError):
            path.unlink()
    with suppress(OSError):
        place.rmdir()


def clear_stale() -> None:
    """Deletes the stale mailboxes of all of this user's runs.

    If a rank is not visible to this process, because it is in another container, it creates its mailbox again.
    """
    for place in _root().glob(f"{_prefix()}*"):
        with suppress(OSError):
            if not is_private_folder(place) or time.time() - place.lstat().st_mtime <= STALE_S:
                continue
            paths = list(place.iterdir())
            if not any(map(_is_written, paths)):
                for path in paths:
                    path.unlink()
                place.rmdir()


def _is_written(path: Path) -> bool:
    """Whether the rank of that row is alive: a rank may be configured to write rarely."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        os.kill(json.loads(path.read_text())["pid"], 0)
        return True
    return False
