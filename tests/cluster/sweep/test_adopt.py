"""A run goes on from another run's checkpoint: the copy counts, and nothing that the run had committed before."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import xxhash

from raydist.cluster.session import Session
from raydist.cluster.sweep.adopt import adopt
from raydist.cluster.sweep.floor import Floor, Pool
from raydist.errors import CheckpointNotFound
from raydist.rundir import RunDir, begin_attempt, manifest_name, resume_attempt
from raydist.sweepdir import SweepDir, SweepLog
from raydist.worker.checkpoint import manifest
from raydist.worker.checkpoint.manifest import FileEntry, Manifest


def commit(run: RunDir, step: int, attempt: int, shard: bytes) -> None:
    """A checkpoint of one file."""
    run.storage.write(manifest.path(step, "shard.bin"), shard)
    entry = FileEntry(len(shard), xxhash.xxh3_128_hexdigest(shard))
    found = Manifest(step, 1, attempt, 0.0, "hash", {"shard.bin": entry}, {}, plain={"cursor": step})
    run.storage.write(manifest.path(step, manifest_name(attempt)), found.dumps())


def run_of(path: Path, attempts: int) -> RunDir:
    """A run with attempts that began at its start."""
    run = RunDir(path)
    for number in range(1, attempts + 1):
        begin_attempt(run, number)
        resume_attempt(run, number, 0)
    return run


def test_adopt(tmp_path: Path) -> None:
    """The newest of the source, at a step that the target has passed; both have a checkpoint there."""
    source, target = run_of(tmp_path / "source", 1), run_of(tmp_path / "target", 3)
    for step, shard in ((4, b"old"), (8, b"the better one's weights")):
        commit(source, step, 1, shard)
    for step in (4, 8, 12):
        commit(target, step, 3, b"the worse one's")
    assert adopt(source, target) == 8
    assert target.committed() == [8]
    found = manifest.read(target, 8)
    assert (found.attempt, found.plain) == (4, {"cursor": 8})
    assert target.storage.read(manifest.path(8, "shard.bin")) == b"the better one's weights"
    assert manifest.verify(target, 8) == []
    assert source.committed() == [4, 8]
    begin_attempt(target, 5)
    resume_attempt(target, 5, 8)
    assert target.committed() == [8]


def test_nothing_to_adopt(tmp_path: Path) -> None:
    """A source without a checkpoint leaves the target as it is."""
    source, target = run_of(tmp_path / "source", 1), run_of(tmp_path / "target", 1)
    commit(target, 4, 1, b"weights")
    with pytest.raises(CheckpointNotFound, match="no checkpoint to go on from"):
        adopt(source, target)
    assert target.committed() == [4]


def test_a_copy_is_told(tmp_path: Path) -> None:
    """Once: to the log, and to whoever asks the floor what has been adopted, with the tokens of the checkpoint."""
    sweep = SweepDir(tmp_path)
    for name in ("source", "target"):
        begin_attempt(sweep.run(name), 1)
        resume_attempt(sweep.run(name), 1, 0)
    commit(sweep.run("source"), 8, 1, b"weights")
    log = SweepLog(sweep)

    def plan(cell: str, changes: Any) -> Any:
        request = SimpleNamespace(run=sweep.run(cell))
        return SimpleNamespace(id=cell, request=request, tokens=lambda step: step * 100)

    nothing: Any = lambda *_: None  # noqa: E731
    pool, session = cast(Pool, None), cast(Session, None)
    floor = Floor(session, pool, log, plan, nothing, nothing, {}, metric="loss", allowed=0)
    changes = {"optim.lr": [1e-3, 2e-3]}
    floor._adopt(plan("target", {}), "source", changes)
    told = {"cell": "target", "source": "source", "step": 8, "tokens": 800, "changes": changes}
    assert list(floor.adopted()) == [told]
    assert list(floor.adopted()) == []
    log.flush()
    assert [(event.kind, event.data) for event in sweep.events()] == [("exploited", told)]
