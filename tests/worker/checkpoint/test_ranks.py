"""Real gloo ranks: each saves its own part, one's failure is everyone's, and any number of ranks restores the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raydist.rundir import RunDir
from raydist.worker.checkpoint import manifest

Launch = Callable[..., list[Any]]


def test_two_ranks_save_and_one_two_or_three_restore(launch: Launch, tmp_path: Path) -> None:
    """The same bytes at every world size; at the same one also the random states: training goes on as if never stopped."""
    saved = launch("save", 2, root=str(tmp_path), steps=2, asynchronous=True)
    assert all(s["committed"] for s in saved)
    newest = saved[0]["digests"]["2"]
    assert newest == saved[1]["digests"]["2"] != saved[0]["digests"]["1"]

    found = manifest.read(RunDir(tmp_path), 2)
    sizes = sorted(f.bytes for f in found.files.values())
    assert len(sizes) == 2, "each rank writes one shard"
    assert sizes[1] - sizes[0] < 0.05 * sum(sizes), f"and each about half: {sizes}"

    for world in (1, 2, 3):
        loaded = launch("load", world, root=str(tmp_path), go_on=world == 2)
        assert [r["step"] for r in loaded] == [2] * world
        assert {r["digest"] for r in loaded} == {newest}
        assert {r["exact"] for r in loaded} == {world == 2}
        if world == 2:
            assert {r["after"] for r in loaded} == {saved[0]["after"]}, "the two steps after it have the same bits"


def test_one_rank_that_cannot_write_costs_no_checkpoint(launch: Launch, tmp_path: Path) -> None:
    """All ranks learn that the save failed, where and why; the one before stays, the next one works, and the loop goes on."""
    ranks = launch("fail_once", 2, root=str(tmp_path))
    for rank in ranks:
        assert [r["committed"] for r in rank["results"]] == [True, False, True]
        assert rank["results"][1]["rank"] == 1
        assert "File too large" in rank["results"][1]["cause"]
        assert rank["committed"] == [1, 3]
    assert [e["kind"] for e in ranks[0]["events"]] == ["checkpoint_saved", "checkpoint_failed", "checkpoint_saved"]
    failed = ranks[0]["events"][1]
    assert (failed["step"], failed["rank"]) == (2, 1)
    assert ranks[1]["events"] == [], "rank 0 speaks for all"
    assert RunDir(tmp_path).storage.folders("checkpoints") == ["step-00000001", "step-00000003"], (
        "nothing is left of it"
    )


@pytest.mark.parametrize("world", [1, 3])
def test_sharded_tensors_are_saved_where_they_are(launch: Launch, tmp_path: Path, world: int) -> None:
    """DTensors: every rank saves its own rows, a copied one is saved once, and other numbers of ranks load them."""
    launch("sharded", 2, root=str(tmp_path), loading=False)
    found = manifest.read(RunDir(tmp_path), 1)
    assert sorted((c.offsets, c.sizes) for c in found.tensors["model/cut"].chunks) == [
        ((0, 0), (4, 5)),
        ((4, 0), (3, 5)),
    ]
    assert len({c.file for c in found.tensors["model/cut"].chunks}) == 2
    assert len(found.tensors["model/copied"].chunks) == 1
    assert manifest.verify(RunDir(tmp_path), 1) == []
    for rank in launch("sharded", world, root=str(tmp_path), loading=True):
        assert rank["model/cut"] == [[float(5 * i + j) for j in range(5)] for i in range(7)]
        assert rank["model/copied"] == [[float(5 * i + j + 1) for j in range(5)] for i in range(7)]
