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
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

SHM = Path("/dev/shm")
STALE_S = 600.0
"""Boards to which nobody has written for so long, and whose ranks are gone, are of runs whose processes were all killed."""
PRIVATE = ("pid", "gpu_uuid")
"""What a row has here beside the columns of raydist.run.telemetry_schema, for the agent: the rank's process, and on a GPU torch's
UUID of it."""


def folder(run_uri: str) -> Path:
    """The same for all who name the run by this URI, on one host."""
    return _root() / f"{_prefix()}{xxhash.xxh64_hexdigest(run_uri.encode())[:12]}"


def _root() -> Path:
    return SHM if SHM.is_dir() else Path(tempfile.gettempdir())


def _prefix() -> str:
    return f"raydist-{os.getuid()}-board-"


def _is_ours(found: os.stat_result) -> bool:
    """Whether that is a folder of this user: its name can be guessed, and SHM is everybody's."""
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


class Mailbox:
    """A rank's side. `node`: the IP address of its node in the cluster."""

    def __init__(self, run_uri: str, node: str, rank: int) -> None:
        """Raises OSError where that folder cannot be made, or is another user's."""
        self._path = folder(run_uri) / f"{node}-{rank:05d}.json"
        self._make()

    def _make(self) -> None:
        place = self._path.parent
        place.mkdir(mode=0o700, exist_ok=True)
        if not _is_ours(place.lstat()):
            raise OSError(f"{place} is not this user's folder")

    def write(self, row: Mapping[str, Any]) -> None:
        """Replaces what stands there. `row`: names and values of raydist.run.telemetry_schema, at least `at` and `rank`, and of
        PRIVATE `pid`.

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


def clear_stale() -> None:
    """Takes away the stale mailboxes of all of this user's runs.

    A rank that this process cannot see, being in another container, makes its own anew.
    """
    for place in _root().glob(f"{_prefix()}*"):
        with suppress(OSError):
            found = place.lstat()
            if not _is_ours(found) or time.time() - found.st_mtime <= STALE_S:
                continue
            paths = list(place.iterdir())
            if not any(map(_is_written, paths)):
                for path in paths:
                    path.unlink()
                place.rmdir()


def _is_written(path: Path) -> bool:
    """Whether the rank whose row that is lives: one that is told to write seldom is not gone."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        os.kill(json.loads(path.read_text())["pid"], 0)
        return True
    return False
