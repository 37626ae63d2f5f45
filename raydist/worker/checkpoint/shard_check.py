"""Reads a rank's share of a checkpoint's shards, and says what is wrong with them.

Runs in: each train worker, and in commands that need weights. Neither torch nor ray.
"""

from __future__ import annotations

import time
from contextlib import suppress

from raydist.checkpoint import manifest
from raydist.checkpoint.manifest import Manifest, Unread
from raydist.errors import StorageError
from raydist.run.directory import RunDir, step_folder

LATE_S, LOOK_S = 3.0, 0.2
"""How long a shard that the manifest names may be unseen here: an NFS client keeps names, and some object stores list late. And how
often to look."""
READ_AGAIN_S = 30.0
"""How long a manifest or a shard that storage refuses to read is read again."""


def problems(run: RunDir, found: Manifest, rank: int, world_size: int) -> list[tuple[str, bool]]:
    """The problems of this rank's share of the files, and whether such a file may be whole. The share: every world_size-th, in
    descending order of size."""
    files = sorted(found.files.items(), key=lambda f: (-f[1].bytes, f[0]))[rank::world_size]
    known = {name: manifest.check_file(run, found.step, name, entry) for name, entry in files}
    begun = time.monotonic()

    def again(name: str, problem: str | None) -> bool:
        waited = time.monotonic() - begun
        if isinstance(problem, Unread):
            return waited < READ_AGAIN_S
        return problem is not None and waited < LATE_S and _absent(run, found.step, name)

    while late := [name for name, problem in known.items() if again(name, problem)]:
        time.sleep(LOOK_S)
        with suppress(StorageError):  # an NFS client asks its server anew about a folder that is listed
            run.storage.files(step_folder(found.step))
        known |= {name: manifest.check_file(run, found.step, name, found.files[name]) for name in late}
    return [(problem, isinstance(problem, Unread) and problem.whole) for problem in known.values() if problem]


def _absent(run: RunDir, step: int, name: str) -> bool:
    try:
        return run.storage.size(manifest.path(step, name)) is None
    except StorageError:
        return False  # there or not, it cannot be read
