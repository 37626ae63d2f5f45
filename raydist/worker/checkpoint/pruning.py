"""Which checkpoints go, and how no reader loses the one that it is reading.

Runs anywhere: plain python, no torch.

A reader leaves a lease in the step's folder, then looks whether that folder is being pruned. Who prunes leaves a mark,
then looks for leases. Whichever comes second sees the other: a leased folder is spared, and a marked one is not read.
A lease ends by its time if its reader died; so does a mark. Files only: it works on any storage, with no locks.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath

from raydist.errors import CheckpointNotFound, StorageError
from raydist.rundir import CHECKPOINTS, MANIFEST, RunDir, step_folder
from raydist.storage import Storage
from raydist.worker.checkpoint import manifest
from raydist.worker.checkpoint.manifest import path

LEASE, MARK = "lease-", "PRUNING"
LEASE_S, MARK_S = 3600.0, 60.0
"""How long a lease and a mark count. No read of a checkpoint, and no look for leases, takes that long."""


class Lease:
    """A reader's claim on one checkpoint, for LEASE_S seconds or until it is released."""

    def __init__(self, run: RunDir, step: int) -> None:
        """Raises CheckpointNotFound if that checkpoint is on its way out."""
        self._storage = run.storage
        self._name: str | None = path(step, f"{LEASE}{uuid.uuid4().hex[:12]}")
        gone = CheckpointNotFound(f"{run.uri}: the checkpoint of step {step} was just pruned", "take a newer one")
        if run.storage.size(path(step)) is None:
            raise gone
        try:
            run.storage.write(self._name, manifest.canonical({"until": time.time() + LEASE_S}))
        except StorageError:
            # A reader that may not write there cannot be seen. It reads unprotected, as docs/checkpoints.md says.
            self._name = None
        if _fresh(run.storage, path(step, MARK)) or run.storage.size(path(step)) is None:
            self.release()
            raise gone

    def release(self) -> None:
        """Gives it back. A second call does nothing."""
        if self._name is not None:
            self._storage.delete(self._name)
            self._name = None


@contextmanager
def leased(run: RunDir, step: int) -> Iterator[None]:
    """Around reading a checkpoint. Raises CheckpointNotFound if it is on its way out."""
    lease = Lease(run, step)
    try:
        yield
    finally:
        lease.release()


def prune(run: RunDir, keep: int, *, orphans: bool = False, spare: int | None = None) -> list[int]:
    """Deletes all committed checkpoints but the `keep` newest, the best, and those being read. Returns their steps.

    `orphans`: also what failed and killed saves left, in any folder but that of step `spare`; only for the one process
    that saves to this run, since another's save in flight looks the same.
    """
    assert keep >= 1, "the newest checkpoint is never pruned"
    rows = manifest.summary(run)
    stay = {r["step"] for r in rows[-keep:]} | {manifest.best_of(rows)}
    gone = [r["step"] for r in rows if r["step"] not in stay and _remove(run.storage, r["step"])]
    if orphans:
        committed = {step_folder(s) for s in run.committed()} | ({step_folder(spare)} if spare is not None else set())
        for folder in run.storage.folders(CHECKPOINTS):
            name = f"{CHECKPOINTS}/{folder}"
            if name not in committed:
                run.storage.delete(name)
    return gone


def sweep(run: RunDir, found: manifest.Manifest) -> None:
    """Deletes the shards in a committed checkpoint's folder that it does not name: an earlier, failed save's."""
    for name in run.storage.files(step_folder(found.step)):
        last = PurePosixPath(name).name
        if last.startswith("shard-") and last not in found.files:
            run.storage.delete(name)


def _remove(storage: Storage, step: int) -> bool:
    mark = path(step, MARK)
    storage.write(mark, manifest.canonical({"until": time.time() + MARK_S}))
    if any(_fresh(storage, n) for n in storage.files(step_folder(step)) if PurePosixPath(n).name.startswith(LEASE)):
        storage.delete(mark)
        return False
    # From here on it is no checkpoint any more, even if this process dies before the shards are gone.
    storage.delete(path(step, MANIFEST))
    storage.delete(step_folder(step))
    return True


def _fresh(storage: Storage, name: str) -> bool:
    try:
        return float(json.loads(storage.read(name))["until"]) > time.time()
    except FileNotFoundError:
        return False
