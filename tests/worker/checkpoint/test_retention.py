"""Pruning: which checkpoints stay, and that no reader loses the one it reads."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import xxhash

from raydist.checkpoint import manifest, retention
from raydist.checkpoint.manifest import FileEntry, Manifest
from raydist.errors import CheckpointNotFound
from raydist.run.directory import RunDir


def put(run: RunDir, step: int, eval_loss: float | None = None) -> None:
    made = Manifest(step, 1, 1, 0.0, "", {}, {}, eval_loss=eval_loss)
    run.storage.write(f"checkpoints/step-{step:08d}/shard-x.bin", b"bytes")
    run.storage.write(manifest.path(step, "MANIFEST-0001.json"), made.dumps())


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Six committed steps, of which the second has the best eval loss."""
    run = RunDir(tmp_path)
    for step in range(1, 7):
        put(run, step, 1.0 if step == 2 else 3.0)
    return run


def test_newest_and_best_stay(run: RunDir) -> None:
    """`keep` newest and the best by eval loss stay; all others are deleted, including their folders."""
    assert retention.prune(run, 2) == [1, 3, 4]
    assert run.committed() == [2, 5, 6]
    assert run.storage.folders("checkpoints") == ["step-00000002", "step-00000005", "step-00000006"]
    assert retention.prune(run, 2) == []


def test_what_is_read_stays(run: RunDir) -> None:
    """A leased checkpoint is spared while it is read, and deleted by the next pruning after."""
    with retention.leased(run, 1):
        assert retention.prune(run, 2) == [3, 4]
        assert manifest.verify(run, 1) == []
    assert retention.prune(run, 2) == [1]


def test_a_long_read_renews_its_lease(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease of a reader that takes longer than LEASE_S is written again before it expires, and is gone after the read."""
    renewed, expires = threading.Event(), []
    write = run.storage.write

    def seen(name: str, data: bytes) -> None:
        write(name, data)
        expires.append(json.loads(data)["until"])
        if len(expires) == 3:
            renewed.set()

    monkeypatch.setattr(run.storage, "write", seen)
    monkeypatch.setattr(retention, "RENEW_S", 0.01)
    with retention.leased(run, 1):
        assert renewed.wait(240)
        assert expires[0] < expires[1] < expires[2]
        monkeypatch.setattr(run.storage, "write", write)
        assert retention.prune(run, 2) == [3, 4]
    assert not [name for name in run.storage.files("checkpoints/step-00000001") if retention.LEASE in name]


def test_a_reader_in_the_midst_of_pruning_turns_away(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that arrives after the mark and before the deletion gets an error, and does not read half a checkpoint."""
    delete = run.storage.delete
    told: list[str] = []

    def come_first(name: str) -> None:
        monkeypatch.undo()
        with pytest.raises(CheckpointNotFound, match="step 1 is being pruned") as caught:
            retention.Lease(RunDir(run.uri), 1)
        told.append(str(caught.value))
        delete(name)

    monkeypatch.setattr(run.storage, "delete", come_first)
    assert retention.prune(run, 2) == [1, 3, 4]
    assert len(told) == 1
    assert 1 not in run.committed()


def test_a_dead_reader_does_not_hold_for_ever(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that was never released expires; so does the mark of a process that died while pruning."""
    monkeypatch.setattr(retention, "LEASE_S", -1.0)
    retention.Lease(run, 1)
    assert retention.prune(run, 2) == [1, 3, 4]
    run.storage.write(manifest.path(5, retention.MARK), b'{"until":0}')
    with retention.leased(run, 5):
        pass


def test_orphans_go(run: RunDir) -> None:
    """Leftovers of a killed save are deleted when the saver prunes; the command line keeps them: a save may be in progress."""
    for step in (7, 8):
        run.storage.write(f"checkpoints/step-{step:08d}/shard-y.bin", b"half")
    retention.prune(run, 6)
    assert len(run.storage.folders("checkpoints")) == 8
    retention.prune(run, 6, orphans=True)
    assert run.storage.folders("checkpoints")[-1] == "step-00000006"


def test_a_folder_that_may_not_be_written_can_be_read(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader without write permission works without a lease."""
    from raydist.errors import StorageError

    def refuse(name: str, data: bytes) -> None:
        raise StorageError(f"cannot write {name}: read-only")

    monkeypatch.setattr(run.storage, "write", refuse)
    with retention.leased(run, 6):
        assert manifest.read(run, 6).step == 6


def test_a_damaged_checkpoint_does_not_count(run: RunDir) -> None:
    """Before older ones are deleted, what stays is read: as many good ones stay as are to be kept, and the damaged one too."""
    body = b"eight by"
    entry = FileEntry(len(body), xxhash.xxh3_128_hexdigest(body))
    for step in (5, 6):
        run.storage.write(manifest.path(step, "s.bin"), body)
        made = Manifest(step, 1, 1, 0.0, "", {"s.bin": entry}, {})
        run.storage.write(manifest.path(step, "MANIFEST-0001.json"), made.dumps())
    run.storage.write(manifest.path(6, "s.bin"), b"eight bY")
    told: list[str] = []
    assert retention.prune(run, 1, damaged=told.append) == [1, 3, 4]
    assert run.committed() == [2, 5, 6]
    assert len(told) == 1
    assert "step-00000006/s.bin" in told[0]
