"""The manifest: its own hash, and the summary of a run's checkpoints."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raydist.checkpoint import manifest
from raydist.checkpoint.manifest import Chunk, FileEntry, Manifest, TensorEntry
from raydist.errors import CheckpointCorrupt, CheckpointNotFound
from raydist.run.directory import RunDir

SMALL = Manifest(
    step=20,
    world_size=2,
    attempt=1,
    saved_at=1700000000.25,
    spec_hash="abc",
    files={"shard-0.bin": FileEntry(8, "f" * 32)},
    tensors={"model/ü": TensorEntry("float32", (2,), (Chunk((0,), (2,), "shard-0.bin", 0, 8),))},
    plain={"cursor": {"epoch": 1}, "loss": 2.5e-8, "none": None},
    numbers={"optim.lr": 0.1, "optim.betas": [0.9, 0.95]},
    eval_loss=float("inf"),
)


def put(run: RunDir, step: int, eval_loss: float | None = None) -> None:
    """A committed checkpoint without shards."""
    made = replace(SMALL, step=step, eval_loss=eval_loss, files={}, tensors={})
    run.storage.write(manifest.path(step, "MANIFEST-0001.json"), made.dumps())


def test_round_trip() -> None:
    """A manifest read back equals the written one, and is written the same again."""
    data = SMALL.dumps()
    assert Manifest.loads(data) == SMALL
    assert Manifest.loads(data).dumps() == data


def test_every_flipped_bit_is_found() -> None:
    """After a flip of any bit of any byte the manifest is rejected."""
    data = SMALL.dumps()
    for position in range(len(data)):
        for bit in range(8):
            bad = bytearray(data)
            bad[position] ^= 1 << bit
            with pytest.raises(ValueError, match="hash"):
                Manifest.loads(bytes(bad))


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_a_manifest_cut_short_is_found(length: int) -> None:
    """A truncated manifest is rejected at any length."""
    with pytest.raises(ValueError, match="hash"):
        Manifest.loads(SMALL.dumps()[:length])


def test_a_manifest_in_another_place_is_refused(tmp_path: Path) -> None:
    """A manifest copied to another step's folder is refused; the message names the file."""
    run = RunDir(tmp_path)
    run.storage.write(manifest.path(30, "MANIFEST-0001.json"), SMALL.dumps())
    with pytest.raises(CheckpointCorrupt, match=r"step-00000030/MANIFEST-0001.json: belongs to step 20"):
        manifest.read(run, 30)
    assert manifest.verify(run, 30) == [f"{tmp_path}/checkpoints/step-00000030/MANIFEST-0001.json: belongs to step 20"]


def test_missing_step_names_those_there_are(tmp_path: Path) -> None:
    """For a step that is not committed the error lists those that are."""
    run = RunDir(tmp_path)
    put(run, 5)
    put(run, 10)
    with pytest.raises(CheckpointNotFound, match="committed steps: 5, 10"):
        manifest.read(run, 7)


def test_best_is_known_from_the_folder_alone(tmp_path: Path) -> None:
    """The lowest finite eval loss wins, the newest among equals; recorded in the manifest, or beside it afterwards."""
    run = RunDir(tmp_path)
    assert manifest.best(run) is None
    for step, loss in [(1, 3.0), (2, 2.0), (3, 2.0), (4, float("nan")), (5, None)]:
        put(run, step, loss)
    assert manifest.best(run) == 3
    manifest.write_eval(run, 5, 1.5)
    assert manifest.best(run) == 5
    assert manifest.read(run, 5).eval_loss == 1.5
    assert [r["best"] for r in manifest.summary(run)] == [False, False, False, False, True]


def test_summary_goes_on_past_a_bad_manifest(tmp_path: Path) -> None:
    """The list shows the bad one with its problem, and `read_newest` returns the one before."""
    run = RunDir(tmp_path)
    put(run, 1)
    put(run, 2)
    run.storage.write(manifest.path(2, "MANIFEST-0001.json"), b"{}")
    rows = manifest.summary(run)
    assert [(r["step"], r["bytes"]) for r in rows] == [(1, 0), (2, None)]
    assert "MANIFEST-0001.json: does not end with the hash" in rows[1]["problem"]
    newest = manifest.read_newest(run)
    assert newest is not None
    assert newest.step == 1


@pytest.mark.parametrize(
    "plain",
    [
        {"SHARED": [], "cursor": 3},
        # Texts by which the tensors are found, in other values.
        {"a": 1, "tensors": {"x": 2}, "version": 1, "xxh3": ""},
        {"text": ',"tensors":{', "other": ',"version":2'},
        {"a": {"a": 0, "tensors": {"version": 3, "versions": {}}, "version": 4}},
    ],
)
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("versions", [{"torch": "2.13"}, {"torch": "2.13", "version": "7", "w": ',"version":'}])
def test_a_manifest_without_its_tensors(plain: dict[str, Any], version: int, versions: dict[str, str]) -> None:
    """All else is as in the whole, whatever is written beside them; a flipped byte in a tensor is found all the same."""
    made = replace(SMALL, plain=plain, version=version, versions=versions)
    assert made.tensors
    assert Manifest.loads(made.dumps(), tensors=False) == replace(made, tensors={})
    with pytest.raises(ValueError, match="hash of its bytes"):
        Manifest.loads(made.dumps().replace(b'"float32"', b'"float33"'), tensors=False)


def test_known_manifests_are_not_read_again(tmp_path: Path) -> None:
    """The summary is the same, with an eval loss that became known later; a checkpoint that is gone is forgotten."""
    run = RunDir(tmp_path)
    known: manifest.Known = {}
    for step in (1, 2, 3):
        put(run, step, None if step == 3 else 2.0)
    assert manifest.summary(run, known) == manifest.summary(run)
    manifest.write_eval(run, 3, 1.5)
    whole = manifest.summary(run)
    for step in (1, 2, 3):  # nobody looks at them
        run.storage.write(manifest.path(step, "MANIFEST-0001.json"), b"{}")
    assert manifest.summary(run, known) == whole
    assert [row["best"] for row in whole] == [False, False, True]
    run.storage.delete(manifest.path(2, "MANIFEST-0001.json"))
    assert [row["step"] for row in manifest.summary(run, known)] == [1, 3]
    assert set(known) == {manifest.path(step, "MANIFEST-0001.json") for step in (1, 3)}


def test_changed_numbers_names_each_field() -> None:
    """Old and new value of each; tuples equal lists, since JSON has no tuples."""
    old = {"optim.lr": 0.1, "optim.betas": [0.9, 0.95], "model.name": "gpt", "gone": None}
    new = {"optim.lr": 0.2, "optim.betas": (0.9, 0.95), "model.name": "mlp", "come": 1}
    assert manifest.changed_numbers(old, new) == [
        "come: was nothing, is 1",
        "gone: was null, is nothing",
        "model.name: was gpt, is mlp",
        "optim.lr: was 0.1, is 0.2",
    ]
    assert manifest.changed_numbers(old, dict(old)) == []


def test_needs_no_torch() -> None:
    """The driver and the command line read manifests and prune without importing torch."""
    code = "import sys; from raydist.checkpoint import manifest, retention; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["../../evil", "/etc/evil", "a/../../../evil"])
def test_a_file_outside_the_folder_is_none(name: str) -> None:
    """A manifest that somebody else has written, with a valid hash, names no file elsewhere."""
    with pytest.raises(ValueError, match="leads out of its folder"):
        Manifest.loads(replace(SMALL, files={**SMALL.files, name: FileEntry(1, "0")}).dumps())
