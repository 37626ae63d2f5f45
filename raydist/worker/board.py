"""Where a rank leaves its newest reading for its node's agent: a small file in memory, replaced whole.

The rank writes, an agent on its node reads; neither waits for the other, and either may die. Runs in: each train worker, and
whoever reads. Neither torch nor ray.

    /dev/shm/raydist-<uid>-board-<run>/<node>-<rank>.json      of one run on this host; mode 0700
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

SHM = Path("/dev/shm")
PRIVATE = ("pid", "gpu_uuid")
"""What a row has here beside the columns of raydist.samples, for the agent: the rank's process, and on a GPU torch's UUID of it."""


def folder(run_uri: str) -> Path:
    """The same for all who name the run by this URI, on one host."""
    root = SHM if SHM.is_dir() else Path(tempfile.gettempdir())
    return root / f"raydist-{os.getuid()}-board-{xxhash.xxh64_hexdigest(run_uri.encode())[:12]}"


class Board:
    """A rank's side. `node`: the IP address of its node in the cluster."""

    def __init__(self, run_uri: str, node: str, rank: int) -> None:
        """Raises OSError where that folder cannot be made, or is another user's."""
        self._path = folder(run_uri) / f"{node}-{rank:05d}.json"
        self._make()

    def _make(self) -> None:
        place = self._path.parent
        place.mkdir(mode=0o700, exist_ok=True)
        found = place.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise OSError(f"{place} is not this user's folder")

    def write(self, row: Mapping[str, Any]) -> None:
        """Replaces what stands there. `row`: names and values of raydist.samples, at least `at` and `rank`, and of PRIVATE `pid`.

        Raises OSError.
        """
        temporary = self._path.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(row))
        except FileNotFoundError:  # the last one to leave has just taken the folder away
            self._make()
            temporary.write_text(json.dumps(row))
        temporary.replace(self._path)

    def close(self) -> None:
        """Takes it away; and the folder, if it was the last one there."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
            self._path.parent.rmdir()


def read(run_uri: str, node: str) -> Iterator[dict[str, Any]]:
    """The newest row of each rank of this run on that node. What cannot be read is left out: it is on its way in or out."""
    for path in sorted(folder(run_uri).glob(f"{node}-*.json")):
        with suppress(OSError, ValueError):
            yield json.loads(path.read_text())


def clear(run_uri: str, node: str) -> None:
    """Takes away what ranks of this run on that node left, also those that were killed."""
    place = folder(run_uri)
    for path in [*place.glob(f"{node}-*.json"), *place.glob(f"{node}-*.tmp")]:
        with suppress(OSError):
            path.unlink()
    with suppress(OSError):
        place.rmdir()
