"""State outside the model and the optimizer: saved, restored on the same mesh, redistributed or reset on another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from raydist.checkpoint import manifest
from raydist.run.directory import RunDir
from raydist.spec import JobSpec
from raydist.worker.attempt import Job, MonitorChannel
from raydist.worker.checkpoint import restore
from raydist.worker.checkpoint.manager import CheckpointManager
from raydist.worker.checkpoint.memory_saver import MemorySaver
from raydist.worker.checkpoint.save import Saver
from raydist.worker.checkpoint.state_dict import TrainState
from raydist.worker.distributed import Rank
from raydist.worker.loop import train
from raydist.worker.parallel import ParamShard
from tests.training import run
from tests.worker.checks.test_bad_steps import dataset, spec_of

__all__ = ["dataset"]


class Kept:
    """Tensors and values, and what was loaded into them."""

    def __init__(self, tensors: dict[str, Tensor], values: dict[str, Any], per_rank: bool = False) -> None:
        self.tensors, self.values, self.per_rank = tensors, values, per_rank
        self.loads = 0

    def state_tensors(self) -> Mapping[str, Tensor]:
        return self.tensors

    def state_values(self) -> Mapping[str, Any]:
        return self.values

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        assert {n: id(t) for n, t in tensors.items()} == {n: id(t) for n, t in self.tensors.items()}
        self.values, self.loads = dict(values), self.loads + 1


class Joined(Kept):
    """It adds up what the ranks had, of tensors of the same shape."""

    def sources(self, own: Mapping[str, Tensor], saved: Mapping[str, tuple[int, ...]]) -> Mapping[str, list[str]]:
        return {n: [n] if saved[n] == tuple(t.shape) else [] for n, t in own.items()}

    def join(self, name: str, total: Tensor, source: str, of_rank: Tensor, first: bool) -> None:
        total += of_rank


def made(rank: Rank, fill: float) -> tuple[TrainState, dict[str, Kept]]:
    """A model with three extra states: equal on all ranks, split over them, and separate on each rank."""
    model = nn.Linear(3, 2)
    state = TrainState(
        model, torch.optim.SGD(model.parameters()), {n: ParamShard(p) for n, p in model.named_parameters()}
    )
    split = torch.arange(7.0) * fill
    if rank.world_size > 1:
        split = distribute_tensor(split, init_device_mesh("cpu", (rank.world_size,)), [Shard(0)])
    extra = {
        "bias": Kept({"load": torch.full((4,), fill)}, {"steps": fill}),
        "outer": Kept({"momentum": split}, {}),
        "error": Kept({"left": torch.full((2, 2), fill * (rank.rank + 1))}, {"scale": fill}, per_rank=True),
    }
    for name, kept in extra.items():
        state.register(name, kept)
    return state, extra


def saver_of(rank: Rank, folder: str, memory: bool = False) -> Saver:
    common: dict[str, Any] = {
        "rank": rank.rank, "world_size": rank.world_size, "group": rank.control, "attempt": 1, "spec_hash": "", "numbers": {},
        "on_event": lambda event: print(event),  # why a save failed
    }  # fmt: skip
    return (
        MemorySaver(Path(folder), kept=None, **common)
        if memory
        else Saver(RunDir(folder), asynchronous=True, keep=2, **common)
    )


def saved(rank: Rank, folder: str, memory: bool, leave_out: tuple[str, ...] = ()) -> None:
    state, _ = made(rank, 2.0)
    for name in leave_out:
        del state._extra[name]
    saver = saver_of(rank, folder, memory)
    saver.start(1, *state.capture())
    assert saver.wait()
    saver.close()


def loaded(rank: Rank, folder: str, mesh: dict[str, int] | None = None) -> tuple[dict[str, str], dict[str, Any]]:
    """(states that are reset, with the reason; for each state its tensor, its values, and how often it was loaded)."""
    state, extra = made(rank, 0.5)
    (name,) = RunDir(folder).manifests().values()
    found = manifest.read(RunDir(folder), 1, name)
    tensors, rank_tensors, _ = state.capture()
    got = restore.load(RunDir(folder), found, tensors, rank_tensors, group=rank.control, mesh=mesh, extra=state.extra)
    state.restore(tensors, rank_tensors, found.plain, restored=got.extra)
    result = {}
    for name, kept in extra.items():
        ((_, tensor),) = kept.tensors.items()
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        result[name] = (whole.reshape(-1).tolist(), kept.values, kept.loads)
    return got.anew, result


SPLIT = (torch.arange(7.0) * 2).tolist()


@pytest.mark.parametrize("memory", [False, True])
def test_all_of_it_on_the_same_mesh(ranks: Any, tmp_path: Path, memory: bool) -> None:
    """From storage and from memory: every rank gets its own state back, the split one is complete, the values are restored."""
    run(ranks, saved, 2, str(tmp_path), memory)
    for rank, (anew, found) in enumerate(run(ranks, loaded, 2, str(tmp_path))):
        assert anew == {}
        assert found["bias"] == ([2.0] * 4, {"steps": 2.0}, 1)
        assert found["outer"] == (SPLIT, {}, 1)
        assert found["error"] == ([2.0 * (rank + 1)] * 4, {"scale": 2.0}, 1)
    found = manifest.read(RunDir(tmp_path), 1, *RunDir(tmp_path).manifests().values())
    assert {n for n in found.tensors if "extra/" in n} == {
        "extra/bias/load", "extra/outer/momentum", "rank/00000/extra/error/left", "rank/00001/extra/error/left",
    }  # fmt: skip


@pytest.mark.parametrize(("world", "mesh"), [(1, None), (3, None), (2, {"data": 1, "tensor": 2})])
def test_another_mesh(ranks: Any, tmp_path: Path, world: int, mesh: dict[str, int] | None) -> None:
    """DTensors are redistributed and equal states loaded; per-rank state is reset, and the reason names the mesh that saved it."""
    run(ranks, saved, 2, str(tmp_path), False)
    for rank, (anew, found) in enumerate(run(ranks, loaded, world, str(tmp_path), mesh)):
        assert anew == {"error": "belongs to ranks, and was saved on the mesh {'data': 2}"}
        assert found["bias"] == ([2.0] * 4, {"steps": 2.0}, 1)
        assert found["outer"] == (SPLIT, {}, 1)
        assert found["error"] == ([0.5 * (rank + 1)] * 4, {"scale": 0.5}, 0)


def test_not_in_the_checkpoint(ranks: Any, tmp_path: Path) -> None:
    """For a checkpoint from before the state existed: the state is reset, and the others are loaded."""
    run(ranks, saved, 2, str(tmp_path), False, ("outer", "error"))
    for anew, found in run(ranks, loaded, 2, str(tmp_path)):
        assert anew == {"outer": "is not in the checkpoint", "error": "is not in the checkpoint"}
        assert found["bias"][2] == 1
        assert [found[name][2] for name in ("outer", "error")] == [0, 0]


def trained(
    rank: Rank, dataset: str, path: str, attempt: int, until: int, names: tuple[str, ...]
) -> tuple[list[float], list[str]]:
    """An attempt of the whole loop with per-rank counters; (their values at the end, the notes). One that is joined has a second
    tensor, of another shape in each attempt."""
    notes: list[str] = []
    counters = {name: Kept({"count": torch.zeros(1)}, {}, per_rank=True) for name in names}
    if "joined" in counters:
        counters["joined"] = Joined({"count": torch.zeros(1), "other": torch.ones(attempt)}, {}, per_rank=True)
    make, before_update = CheckpointManager.__init__, CheckpointManager.before_update

    def registered(self: CheckpointManager, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        for name, kept in counters.items():
            self.register(name, kept)

    def counting(self: CheckpointManager) -> None:
        before_update(self)
        for kept in counters.values():
            kept.tensors["count"] += rank.rank + 1

    def push(records: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
        notes.extend(e["text"] for e in events if e["kind"] == "note" and "extra state" in e["text"])

    spec: JobSpec = spec_of(dataset)
    CheckpointManager.__init__, CheckpointManager.before_update = registered, counting  # type: ignore[method-assign]
    try:
        train(
            Job(spec, RunDir(path), dataset, attempt, until),
            rank,
            MonitorChannel(push, lambda: None) if rank.first else None,
        )
    finally:
        CheckpointManager.__init__, CheckpointManager.before_update = make, before_update  # type: ignore[method-assign]
    return [float(kept.tensors["count"]) for kept in counters.values()], notes


def test_in_the_whole_loop(ranks: Any, dataset: str, tmp_path: Path) -> None:
    """Two ranks continue their own counts; with a third rank all are reset, which a note reports; a note also reports a name that
    the checkpoint lacks, and one that the job no longer has. What ranks had of a state with a tensor of another shape is added up,
    without this tensor, which a note reports."""
    path = str(tmp_path / "run")
    assert run(ranks, trained, 2, dataset, path, 1, 3, ("steps", "joined")) == [([3.0, 3.0], []), ([6.0, 6.0], [])]
    note = "extra state joined: its tensors that were saved with other shapes start from their initial values"
    assert run(ranks, trained, 2, dataset, path, 2, 5, ("steps", "joined")) == [
        ([5.0, 11.0], [note]),
        ([10.0, 13.0], []),
    ]
    found = run(ranks, trained, 3, dataset, path, 3, 7, ("steps", "new"))
    assert [counts for counts, _ in found] == [[2.0, 2.0], [4.0, 4.0], [6.0, 6.0]]
    assert found[0][1] == [
        "extra state steps starts from its initial value: it belongs to ranks, and was saved on the mesh {'data': 2}",
        "extra state new starts from its initial value: it is not in the checkpoint",
        "extra state joined of the checkpoint is not used by this job",
    ]
    ((_, notes), *_) = run(ranks, trained, 2, dataset, path, 4, 8, ())
    assert notes == [f"extra state {name} of the checkpoint is not used by this job" for name in ("new", "steps")]
