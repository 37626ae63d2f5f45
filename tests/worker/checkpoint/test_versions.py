"""Manifests of other versions: version 1 is read, a newer one is refused with one clear error.

version1/ was written by raydist before version 2: two ranks, zero1, two steps of the model below; expected.json has the SHA-256
of each whole tensor.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from raydist.checkpoint import manifest
from raydist.checkpoint.manifest import Manifest
from raydist.errors import CheckpointTooNew
from raydist.run.directory import RunDir
from raydist.worker.checkpoint import restore
from raydist.worker.checkpoint.state_dict import TrainState
from raydist.worker.distributed import Rank
from tests.training import CONTEXT, Trainer, job, run

OLD = Path(__file__).parent / "version1"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy, since a restore writes leases into the folder."""
    return shutil.copytree(OLD, tmp_path / "old")


def hashes(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    whole = {n: (t.full_tensor() if isinstance(t, DTensor) else t) for n, t in tensors.items()}
    return {
        n: hashlib.sha256(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for n, t in whole.items()
    }


def loaded(rank: Rank, folder: str, strategy: str) -> dict[str, str]:
    """The hashes of all loaded tensors."""
    small = {"layers": 1, "width": 8, "heads": 1, "context": CONTEXT}
    trainer = Trainer(rank, job(strategy, small), full=4 * CONTEXT)
    state = TrainState(trainer.model, trainer.optimizer, trainer.strategy.shards())
    found = restore.choose(RunDir(folder), rank=rank.rank, world_size=rank.world_size, group=rank.control)
    assert found is not None
    tensors, rank_tensors, _ = state.capture()
    restore.load(RunDir(folder), found, tensors, rank_tensors, group=rank.control)
    state.restore(tensors, rank_tensors, found.plain)
    return hashes(tensors)


@pytest.mark.parametrize(("world", "strategy"), [(1, "ddp"), (2, "zero1"), (2, "ddp"), (3, "zero3")])
def test_version_1_is_read(ranks: Any, old: Path, world: int, strategy: str) -> None:
    """Every tensor to the bit, at any number of ranks. Its random states, which are no state any more, are left out."""
    expected = json.loads((OLD / "expected.json").read_text())
    for found in run(ranks, loaded, world, str(old), strategy):
        assert found == {n: value for n, value in expected.items() if not n.startswith("rank/")}


def test_version_1_is_listed_and_verified(old: Path) -> None:
    """The commands read it as before; its mesh is derived from its ranks, and writing it again gives the same bytes."""
    place = RunDir(old)
    assert manifest.verify(place, 2) == []
    (row,) = manifest.summary(place)
    assert (row["step"], row["world_size"], row["problem"]) == (2, 2, None)
    found = manifest.read(place, 2)
    assert (found.version, found.mesh) == (1, {"data": 2})
    (file,) = (old / "checkpoints/step-00000002").glob("MANIFEST-*")
    assert found.dumps() == file.read_bytes()


def chosen(rank: Rank, folder: str) -> None:
    restore.choose(RunDir(folder), rank=rank.rank, world_size=rank.world_size, group=rank.control)


@pytest.mark.parametrize("world", [1, 2])
def test_a_newer_version_is_refused(ranks: Any, old: Path, world: int) -> None:
    """On every rank, with file, versions and remedy; an older checkpoint is not used instead. `verify` and `list` report it too."""
    place = RunDir(old)
    newer = replace(manifest.read(place, 2), step=3, version=99, mesh={"data": 2})
    place.storage.write(manifest.path(3, "MANIFEST-0001.json"), newer.dumps())
    text = f"{old}/checkpoints/step-00000003/MANIFEST-0001.json: has version 99; this raydist reads versions 1 to 2"
    if world == 1:
        with pytest.raises(CheckpointTooNew, match="has version 99"):
            restore.choose(place)
    else:
        for error in ranks.run(chosen, world, str(old)):
            assert isinstance(error, CheckpointTooNew)
            assert (error.message, error.hint) == (text, "use the raydist that wrote it, or newer")
    assert manifest.verify(place, 3) == [text]
    assert [row["problem"] for row in manifest.summary(place)] == [None, text]


def test_meshes_compare_by_their_axes() -> None:
    """Axes of size one do not count; a manifest without a mesh is data parallel."""
    facts: Any = {
        "step": 1,
        "world_size": 4,
        "attempt": 1,
        "saved_at": 0.0,
        "spec_hash": "",
        "files": {},
        "tensors": {},
    }
    sizes = {"pipeline": 1, "data": 4, "context": 1, "tensor": 1}
    assert Manifest(**facts, mesh=sizes).mesh == Manifest(**facts).mesh == {"data": 4}
    made = Manifest(**facts, mesh={"data": 2, "tensor": 2})
    assert Manifest.loads(made.dumps()).mesh == {"data": 2, "tensor": 2}
