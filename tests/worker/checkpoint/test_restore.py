"""Restoring the newest checkpoint whose every byte is correct, with compatible names and shapes, without unpickling."""

from __future__ import annotations

import errno
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from raydist.checkpoint import manifest, retention
from raydist.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, StorageError
from raydist.records import Event
from raydist.run.directory import RunDir
from raydist.storage import Storage
from raydist.worker.checkpoint import restore, shard_check


@pytest.fixture
def saved(kit: Any, tmp_path: Path) -> RunDir:
    """Steps 10 and 20."""
    one = kit.OneRank(tmp_path)
    one.save(10)
    one.save(20)
    one.saver.close()
    return one.run


def files(run: RunDir, step: int) -> list[Path]:
    return sorted(Path(run.uri, "checkpoints", f"step-{step:08d}").iterdir())


def flip(path: Path, position: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(position * (len(data) - 1))] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize("position", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("which", ["MANIFEST-0001.json", "shard"])
def test_a_flipped_byte_is_found_and_the_one_before_taken(saved: RunDir, kit: Any, which: str, position: float) -> None:
    """verify names the file, choose falls back and reports it in an event, and loading gives the state before."""
    (bad,) = (f for f in files(saved, 20) if f.name.startswith(which))
    flip(bad, position)
    (problem,) = manifest.verify(saved, 20)
    assert str(bad) in problem
    events: list[Event] = []
    found = restore.choose(saved, on_event=events.append)
    assert found is not None
    assert found.step == 10
    assert [(e.kind, e.data["step"]) for e in events] == [("checkpoint_rejected", 20)]
    assert events[0].data["file"] == str(bad)
    into = kit.empty()
    restore.load(saved, found, into, {})
    assert kit.same(into, kit.state(10))


def test_a_shard_that_is_seen_late_is_no_loss(saved: RunDir, tmp_path: Path) -> None:
    """The newest checkpoint is taken once this host sees all of it, as behind a cache of names; nothing is reported."""
    (shard,) = (f for f in files(saved, 20) if f.name.startswith("shard"))
    shard.rename(tmp_path / "unseen")
    later = threading.Timer(0.3, (tmp_path / "unseen").rename, (shard,))
    later.start()
    events: list[Event] = []
    found = restore.choose(saved, on_event=events.append)
    later.join()
    assert found is not None
    assert (found.step, events) == (20, [])


@pytest.mark.parametrize("of", ["shard", "MANIFEST"])
@pytest.mark.parametrize(
    ("code", "times", "taken"),
    [(errno.ESTALE, 2, 20), (errno.EIO, 2, 20), (errno.ESTALE, 10**9, None), (errno.EIO, 10**9, 10)],
)
def test_what_storage_does_not_read_is_not_given_up(
    code: int, times: int, taken: int | None, of: str, saved: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read again. If it stays so, nobody goes on from the step before, which would void a checkpoint that may be whole; but
    bytes that a disk cannot read are lost."""
    left, events = [times], list[Event]()

    def refuse(name: str) -> None:
        if "step-00000020" in name and f"/{of}" in name and left[0] > 0:
            left[0] -= 1
            raise StorageError(f"cannot read {name}: {os.strerror(code)}", "") from OSError(code, os.strerror(code))

    for how in ("open", "read"):
        real = getattr(Storage, how)
        monkeypatch.setattr(Storage, how, lambda self, name, real=real: (refuse(name), real(self, name))[1])
    monkeypatch.setattr(shard_check, "READ_AGAIN_S", 240.0 if times < 10 else 0.1)
    monkeypatch.setattr(shard_check, "LOOK_S", 0.01)
    if taken is None:
        with pytest.raises(StorageError, match="(?s)step 20: .*it may be whole"):
            restore.choose(saved, on_event=events.append)
        assert not events
    else:
        found = restore.choose(saved, on_event=events.append)
        assert found is not None
        assert found.step == taken
        assert [event.data["step"] for event in events] == ([] if taken == 20 else [20])


def test_a_shard_cut_short_or_missing_is_named(saved: RunDir) -> None:
    """The error has the sizes, or says that it is missing."""
    (shard,) = (f for f in files(saved, 20) if f.name.startswith("shard"))
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    assert manifest.verify(saved, 20) == [f"{shard}: {len(data) - 1} bytes instead of {len(data)}"]
    shard.unlink()
    assert manifest.verify(saved, 20) == [f"{shard}: is missing"]
    found = restore.choose(saved)
    assert found is not None
    assert found.step == 10


def test_none_good(saved: RunDir) -> None:
    """If all are corrupt, training must not silently start from zero: CheckpointCorrupt names every file."""
    for step in (10, 20):
        flip(files(saved, step)[-1], 0.5)
    with pytest.raises(CheckpointCorrupt) as caught:
        restore.choose(saved)
    assert all(str(files(saved, step)[-1]) in caught.value.message for step in (10, 20))


def test_none_there(tmp_path: Path) -> None:
    """A run without checkpoints starts from zero."""
    assert restore.choose(RunDir(tmp_path)) is None


def test_uncommitted_is_no_checkpoint(saved: RunDir) -> None:
    """Shards without their manifest are ignored."""
    saved.storage.delete(manifest.path(20, "MANIFEST-0001.json"))
    found = restore.choose(saved)
    assert found is not None
    assert found.step == 10
    with pytest.raises(CheckpointNotFound, match="no checkpoint of step 20"):
        restore.choose(saved, step=20)


def test_a_step_by_its_number(saved: RunDir) -> None:
    """Exactly the requested step, never another one."""
    found = restore.choose(saved, step=10)
    assert found is not None
    assert found.step == 10
    flip(files(saved, 10)[-1], 0.5)
    with pytest.raises(CheckpointCorrupt, match="step-00000010"):
        restore.choose(saved, step=10)


def test_what_is_chosen_is_safe_until_it_is_loaded(saved: RunDir, kit: Any) -> None:
    """Between `choose` and the end of `load` it is not pruned; a rejected one may be."""
    found = restore.choose(saved, step=10)
    assert found is not None
    assert retention.prune(saved, 1) == []
    restore.load(saved, found, kit.empty(), {})
    assert retention.prune(saved, 1) == [10]
    flip(files(saved, 20)[-1], 0.5)
    with pytest.raises(CheckpointCorrupt):
        restore.choose(saved)
    assert not any(f.name.startswith(retention.LEASE) for f in files(saved, 20))


def test_mismatches_are_named(saved: RunDir, kit: Any) -> None:
    """Missing, unexpected, of another shape, of another dtype: all in one error, and nothing is written."""
    found = restore.choose(saved)
    assert found is not None
    into = kit.empty()
    del into["model/bf16"]
    into["model/new"] = torch.zeros(1)
    into["model/scalar"] = torch.zeros(2, dtype=torch.int64)
    into["optim/matrix/step"] = torch.tensor(0.0, dtype=torch.float64)
    with pytest.raises(CheckpointError) as caught:
        restore.load(saved, found, into, {})
    for line in (
        "model/bf16: not wanted here",
        "model/new: not in the checkpoint",
        "model/scalar: saved with shape [], wanted [2]",
        "optim/matrix/step: saved as float32, wanted float64",
    ):
        assert line in caught.value.message
    assert not into["model/matrix"].any()


def test_weights_alone(saved: RunDir, kit: Any) -> None:
    """The model can be loaded without its optimizer: completeness is checked per name part before the first slash."""
    found = restore.choose(saved)
    assert found is not None
    weights = {n: t for n, t in kit.empty().items() if n.startswith("model/")}
    restore.load(saved, found, weights, {})
    assert kit.same(weights, {n: t for n, t in kit.state(20).items() if n.startswith("model/")})


def test_nothing_is_unpickled(saved: RunDir, kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restoring calls no unpickler, and no file of a checkpoint holds a pickle."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("unpickled")

    monkeypatch.setattr(torch, "load", refuse)
    for name in ("load", "loads", "Unpickler", "_load", "_loads", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    found = restore.choose(saved)
    assert found is not None
    into, own = kit.empty(), kit.own(1)
    restore.load(saved, found, into, own)
    assert kit.same(into | own, kit.state(20) | kit.own(20))
