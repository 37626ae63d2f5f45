"""Ranks that hold different plain tensors, as pipeline stages do: a checkpoint has all of them, or there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raydist.checkpoint import coverage, manifest
from raydist.checkpoint.memory_layout import PEERS, SHARED, needs
from raydist.errors import CheckpointError
from raydist.run.directory import RunDir
from raydist.worker.checkpoint import restore, save_plan
from raydist.worker.checkpoint.memory_saver import MemorySaver
from raydist.worker.checkpoint.save import Saver
from raydist.worker.checkpoint.state_dict import TrainState
from raydist.worker.distributed import Rank
from raydist.worker.parallel import ParamShard
from raydist.worker.parameter_table import gather_parameters
from tests.training import run


class Stage(nn.Module):
    """Two stages of two ranks, or (`stage` None) the whole model in one process."""

    def __init__(self, stage: int | None, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        layers = {f"layer{i}": nn.Linear(300, 900) for i in range(4)}
        self.layers = nn.ModuleDict({n: m for n, m in layers.items() if stage is None or int(n[-1]) // 2 == stage})


def state_of(stage: int | None, seed: int) -> tuple[TrainState, dict[str, ParamShard]]:
    model = Stage(stage, seed)
    shards = {n: ParamShard(p) for n, p in model.named_parameters()}
    return TrainState(model, torch.optim.AdamW(model.parameters()), shards), shards


def filled(tensors: dict[str, Tensor]) -> None:
    """Fills optimizer moments with values that depend on their names."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name.startswith("optim/"):
                tensor.fill_(len(name) + sum(name.encode()) % 7)


def saved(rank: Rank, folder: str, lose: str = "", memory: bool = False) -> tuple[bool, str | None]:
    """Two stages save; the ranks of the second one omit `lose`."""
    state, shards = state_of(rank.rank // 2, 5)
    common: dict[str, Any] = {
        "rank": rank.rank, "world_size": rank.world_size, "group": rank.control, "attempt": 1, "spec_hash": "", "numbers": {},
        "on_event": lambda event: None, "mesh": {"pipeline": 2, "data": 2}, "parameters": gather_parameters(shards, rank),
    }  # fmt: skip
    saver = (
        MemorySaver(Path(folder), kept=None, **common)
        if memory
        else Saver(RunDir(folder), asynchronous=True, keep=2, **common)
    )
    tensors, rank_tensors, plain = state.capture()
    filled(tensors)
    if lose.startswith("captured "):
        tensors.pop(lose.removeprefix("captured "), None)
    original = save_plan.plan
    if lose:
        save_plan.plan = lambda *args, **kwargs: [p for p in original(*args, **kwargs) if p.name != lose]  # type: ignore[assignment]
    try:
        saver.start(3, tensors, rank_tensors, {"step": 3, **plain})
        result = saver.wait()
    finally:
        save_plan.plan = original
    saver.close()
    assert result is not None
    return result.committed, result.cause


def loaded(rank: Rank, folder: str, staged: bool, mesh: dict[str, int] | None) -> dict[str, float]:
    """For each tensor of this rank the difference from the saved one."""
    stage = rank.rank // 2 if staged else None
    expected = state_of(None, 5)[0].capture()[0]
    filled(expected)
    state, _ = state_of(stage, 77)
    found = restore.choose(RunDir(folder), rank=rank.rank, world_size=rank.world_size, group=rank.control)
    assert found is not None
    tensors, rank_tensors, _ = state.capture()
    restore.load(RunDir(folder), found, tensors, rank_tensors, group=rank.control, mesh=mesh)
    state.restore(tensors, rank_tensors, found.plain)
    return {n: float((t.float() - expected[n].float()).abs().max()) for n, t in tensors.items()}


def test_stages_save_all_layers(ranks: Any, tmp_path: Path) -> None:
    """The ranks of a stage share its tensors; the same stages, other numbers of ranks and one process load each of them to the
    bit."""
    assert run(ranks, saved, 4, str(tmp_path)) == [(True, None)] * 4
    found = manifest.read(RunDir(tmp_path), 3)
    assert (found.version, found.mesh) == (2, {"data": 2, "pipeline": 2})
    sizes = sorted(entry.bytes for entry in found.files.values())
    assert len(sizes) == 4
    assert sizes[-1] < 1.1 * sizes[0], "each rank writes about a quarter"
    assert manifest.verify(RunDir(tmp_path), 3) == []
    names = set(state_of(None, 5)[0].capture()[0])
    for world, staged, mesh in (
        (1, False, None),
        (4, True, {"pipeline": 2, "data": 2}),
        (4, True, None),
        (2, False, None),
    ):
        results = run(ranks, loaded, world, str(tmp_path), staged, mesh)
        assert {name for off in results for name in off} == names
        assert all(difference == 0 for off in results for difference in off.values())


def test_what_no_rank_wants_is_named(ranks: Any, tmp_path: Path) -> None:
    """A single rank may request a subset of names, but all ranks together must request every name: two ranks of the first stage
    are refused."""
    run(ranks, saved, 4, str(tmp_path))
    for error in ranks.run(loaded, 2, str(tmp_path), True, None):
        assert isinstance(error, CheckpointError)
        assert "model/layers.layer2.weight: not wanted here" in error.message


LOST = "model/layers.layer3.weight"


@pytest.mark.parametrize(
    ("lose", "cause"),
    [
        (LOST, f"{LOST}: no rank saves it"),
        (f"captured {LOST}", f"{LOST}: no rank saves it"),
    ],
)
def test_a_missing_layer_is_no_checkpoint(ranks: Any, tmp_path: Path, lose: str, cause: str) -> None:
    """If a rank's plan or its state lacks it: no commit, and every rank learns the name."""
    for committed, why in run(ranks, saved, 4, str(tmp_path), lose):
        assert not committed
        assert f"the checkpoint would be incomplete: {cause}" in str(why)
    assert RunDir(tmp_path).committed() == []
    assert not list(tmp_path.rglob("shard-*")), "it is refused before anything is written"


def test_snapshots_of_stages(ranks: Any, tmp_path: Path) -> None:
    """In memory a rank needs only its own shard and those of its stage."""
    assert all(committed for committed, _ in run(ranks, saved, 4, str(tmp_path), "", True))
    (name,) = RunDir(tmp_path).manifests().values()
    found = manifest.read(RunDir(tmp_path), 3, name)
    assert (found.plain[SHARED], found.plain[PEERS]) == ([], [[0, 1], [2, 3]])
    by_rank = {int(file.split("-")[1]): file for file in found.files}
    for rank in range(4):
        peers = (0, 1) if rank < 2 else (2, 3)
        assert needs(found, rank, 4) == (set(), {by_rank[peer] for peer in peers})


def test_coverage_by_hand() -> None:
    """Missing, too small, overlapping and misplaced chunks are reported by name; empty tensors and scalars count."""
    wanted = {"a": (4, 2), "b": (2,), "c": (), "d": (0, 3), "e": (4,), "f": (3,)}
    saved = {
        "a": ((4, 2), [((0, 0), (2, 2)), ((2, 0), (2, 1)), ((2, 1), (2, 1))]),
        "c": ((), [((), ())]),
        "d": ((0, 3), [((0, 0), (0, 3))]),
    }
    whole = {
        **saved,
        "b": ((2,), [((0,), (2,))]),
        "e": ((4,), [((2,), (2,)), ((0,), (2,))]),
        "f": ((3,), [((0,), (3,))]),
    }
    assert coverage.uncovered(wanted, whole) == []
    bad = {**saved, "e": ((4,), [((0,), (2,)), ((1,), (2,))]), "f": ((3,), [((1,), (3,))])}
    assert coverage.uncovered(wanted, bad) == [
        "b: no rank saves it",
        "e: its 2 chunks overlap, or reach over its shape [4]",
        "f: its 1 chunks overlap, or reach over its shape [3]",
    ]
    assert coverage.uncovered({"a": (4, 2)}, {"a": ((4, 2), [((0, 0), (3, 2))])}) == ["a: 6 of 8 elements are saved"]
    assert coverage.uncovered({"a": (4, 2)}, {"a": ((4, 3), [])}) == ["a: saved with shape [4, 3], has shape [4, 2]"]
    many = {str(n): (1,) for n in range(15)}
    assert coverage.sentence(coverage.uncovered(many, {})).endswith("; and 5 more")


def test_many_chunks_are_checked_at_once() -> None:
    """10,000 rows of one tensor, each a separate chunk."""
    boxes = [((row, 0), (1, 8)) for row in range(10_000)]
    assert coverage.uncovered({"a": (10_000, 8)}, {"a": ((10_000, 8), boxes)}) == []
