"""Another cell's checkpoint becomes one of a cell's own run: how pbt copies.

Runs in: the driver, in the thread of a cell. Never imports ray or torch.

The other cell's newest committed checkpoint, weights, optimizer and cursor, is copied as a new attempt's of this cell's run, before
which its own ones do not count any more.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from raydist.errors import CheckpointNotFound
from raydist.rundir import RunDir, begin_attempt, manifest_name, resume_attempt
from raydist.runlog import last_attempt
from raydist.worker.checkpoint import manifest

_TRIES = 3


def adopt(source: RunDir, target: RunDir) -> int:
    """Makes the newest committed checkpoint of `source`, which may train meanwhile, the newest one of `target`, which does not.

    Returns its step. Raises CheckpointNotFound, StorageError, and CheckpointCorrupt where what has arrived is not what was read.
    """
    for _ in range(_TRIES - 1):
        with suppress(FileNotFoundError, CheckpointNotFound):  # pruned while it was read: there is a newer one
            return _adopt(source, target)
    return _adopt(source, target)


def _adopt(source: RunDir, target: RunDir) -> int:
    found = manifest.read_newest(source)
    if found is None:
        raise CheckpointNotFound(f"{source.uri}: no checkpoint to go on from", "")
    for name in found.files:
        place = manifest.path(found.step, name)
        target.storage.write(place, source.storage.read(place))
    number = max(last_attempt(target), target.lineage().newest) + 1
    begin_attempt(target, number)
    resume_attempt(target, number, 0)  # what this run has committed so far is another story
    mine = replace(found, attempt=number)
    target.storage.write(manifest.path(found.step, manifest_name(number)), mine.dumps())
    if problems := manifest.verify(target, found.step):
        raise CheckpointNotFound(f"{target.uri}: the copy of {source.uri} is damaged: {problems[0]}", "")
    return found.step
