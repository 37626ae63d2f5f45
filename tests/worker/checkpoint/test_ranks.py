"""Real gloo ranks: each saves its own part, a failure of one is a failure of all, and any number of ranks restores the same
state."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from raydist.checkpoint import manifest
from raydist.run.directory import RunDir
from raydist.worker.checkpoint import restore
from raydist.worker.checkpoint.save import Saver
from raydist.worker.checkpoint.shard_writer import ShardWriter
from raydist.worker.checkpoint.state_dict import TrainState
from raydist.worker.distributed import Rank
from raydist.worker.parallel import ParamShard


def digest(tensors: Mapping[str, Tensor]) -> str:
    """One hash of names and bytes."""
    hasher = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        hasher.update(name.encode() + tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def toy(rank: Rank) -> tuple[nn.Module, torch.optim.Optimizer, TrainState]:
    """A model whose matrix is large enough to be split over the ranks, with dropout, under DDP if there are peers."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(300, 1500), nn.Dropout(0.2), nn.Linear(1500, 7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = TrainState(model, optimizer, {n: ParamShard(p) for n, p in model.named_parameters()})
    return DistributedDataParallel(model) if rank.world_size > 1 else model, optimizer, state


def train(rank: Rank, ddp: nn.Module, optimizer: torch.optim.Optimizer, saver: Saver | None, step: int) -> None:
    """One update on data and dropout masks that depend only on step and rank."""
    torch.manual_seed(100 * step + rank.rank)
    ddp(torch.randn(4, 300)).square().mean().backward()
    if saver is not None:
        saver.before_update()
    optimizer.step()
    optimizer.zero_grad()


def make_saver(rank: Rank, root: str, events: list[Any]) -> Saver:
    return Saver(
        RunDir(root), rank=rank.rank, world_size=rank.world_size, group=rank.control, asynchronous=True, keep=10,
        attempt=1, spec_hash="abc", numbers={}, on_event=lambda e: events.append(e.to_dict()),
    )  # fmt: skip


def save(rank: Rank, root: str, steps: int) -> dict[str, Any]:
    """Trains and saves after each step; two more steps after the last save, to compare with a resumed run."""
    ddp, optimizer, state = toy(rank)
    saver = make_saver(rank, root, [])
    digests = []
    for step in range(1, steps + 1):
        train(rank, ddp, optimizer, saver, step)
        tensors, rank_tensors, plain = state.capture()
        digests.append(digest(tensors))
        saver.start(step, tensors, rank_tensors, plain)
    result = saver.wait()
    saver.close()
    for step in (steps + 1, steps + 2):
        train(rank, ddp, optimizer, None, step)
    return {"digests": digests, "after": digest(state.capture()[0]), "committed": bool(result)}


def load(rank: Rank, root: str) -> dict[str, Any]:
    """Restores the newest good checkpoint into a fresh state, and trains two more steps."""
    ddp, optimizer, state = toy(rank)
    run, events = RunDir(root), list[Any]()
    found = restore.choose(
        run,
        rank=rank.rank,
        world_size=rank.world_size,
        group=rank.control,
        on_event=lambda e: events.append(e.to_dict()),
    )
    assert found is not None
    tensors, rank_tensors, _ = state.capture()
    restore.load(run, found, tensors, rank_tensors, group=rank.control)
    state.restore(tensors, rank_tensors, found.plain)
    loaded = digest(state.capture()[0])
    for step in (found.step + 1, found.step + 2):
        train(rank, ddp, optimizer, None, step)
    after = digest(state.capture()[0])
    return {"step": found.step, "digest": loaded, "after": after, "events": events}


def test_two_ranks_save_and_one_two_or_three_restore(ranks: Any, tmp_path: Path) -> None:
    """The same bytes at every world size; at the same one training continues as if never stopped."""
    saved = ranks.run(save, 2, str(tmp_path), 2)
    assert all(s["committed"] for s in saved)
    assert saved[0]["digests"] == saved[1]["digests"]
    newest = saved[0]["digests"][1]

    found = manifest.read(RunDir(tmp_path), 2)
    sizes = sorted(f.bytes for f in found.files.values())
    assert len(sizes) == 2, "each rank writes one shard"
    assert sizes[1] - sizes[0] < 0.05 * sum(sizes), f"and each about half: {sizes}"

    for world in (1, 2, 3):
        loaded = ranks.run(load, world, str(tmp_path))
        assert [r["step"] for r in loaded] == [2] * world
        assert {r["digest"] for r in loaded} == {newest}
        if world == 2:
            assert {r["after"] for r in loaded} == {saved[0]["after"]}, "the two steps after it have the same bits"

    # Each rank checks only its share of the hashes, yet all of them reject the checkpoint if one finds a wrong byte.
    for name in found.files:
        shard = tmp_path / manifest.path(2, name)
        good = shard.read_bytes()
        shard.write_bytes(bytes([good[0] ^ 1]) + good[1:])
        loaded = ranks.run(load, 2, str(tmp_path))
        shard.write_bytes(good)
        assert [(r["step"], r["digest"]) for r in loaded] == [(1, saved[0]["digests"][0])] * 2
        assert [(e["kind"], e["file"]) for e in loaded[0]["events"]] == [("checkpoint_rejected", str(shard))]


def fail_once(rank: Rank, root: str) -> dict[str, Any]:
    """Saves steps 1, 2 and 3; at step 2 rank 1 may not write more than 64 KiB to a file."""
    ddp, optimizer, state = toy(rank)
    events: list[Any] = []
    saver = make_saver(rank, root, events)
    # The write then fails with EFBIG, as on a full disk with ENOSPC.
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    results = []
    for step in (1, 2, 3):
        train(rank, ddp, optimizer, saver, step)
        if step == 2 and rank.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
        saver.start(step, *state.capture())
        saver.before_update()  # the loop continues unaffected
        result = saver.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert result is not None
        results.append((result.committed, result.failed_rank, result.cause))
    saver.close()
    signal.signal(signal.SIGXFSZ, before)
    return {"results": results, "events": events}


def test_one_rank_that_cannot_write_costs_no_checkpoint(ranks: Any, tmp_path: Path) -> None:
    """All ranks learn that the save failed, where and why; the checkpoint before stays, the next save works, and the loop
    continues."""
    found = ranks.run(fail_once, 2, str(tmp_path))
    for rank in found:
        assert [r[0] for r in rank["results"]] == [True, False, True]
        assert rank["results"][1][1] == 1
        assert "File too large" in rank["results"][1][2]
    assert [e["kind"] for e in found[0]["events"]] == ["checkpoint_saved", "checkpoint_failed", "checkpoint_saved"]
    failed = found[0]["events"][1]
    assert (failed["step"], failed["rank"]) == (2, 1)
    assert found[1]["events"] == [], "rank 0 speaks for all"
    assert RunDir(tmp_path).committed() == [1, 3]
    assert RunDir(tmp_path).storage.folders("checkpoints") == ["step-00000001", "step-00000003"], (
        "nothing is left of it"
    )


def lose_a_peer(rank: Rank, root: str) -> Any:
    """Saves step 1; rank 1 dies in the middle of saving step 2."""
    saver = make_saver(rank, root, [])
    tensors = {"model/a": torch.zeros(1000, 1000)}
    saver.start(1, tensors, {}, {})
    saver.wait()
    if rank.rank == 1:
        ShardWriter._write = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    saver.start(2, tensors, {}, {})
    saver.before_update()
    result = saver.wait()
    saver.close()
    return result


def test_a_peer_that_dies_in_the_midst(ranks: Any, tmp_path: Path) -> None:
    """The others neither hang nor commit: the save has failed, and the checkpoint before is there."""
    found = ranks.run(lose_a_peer, 2, str(tmp_path))
    assert isinstance(found[1], ChildProcessError)
    assert found[0].committed is False
    assert found[0].cause
    assert RunDir(tmp_path).committed() == [1]
    assert manifest.verify(RunDir(tmp_path), 1) == []


def place(rank: Rank, tensor: Tensor) -> dict[str, Tensor]:
    """A DTensor split unevenly over the ranks, and a replicated one."""
    mesh = init_device_mesh("cpu", (rank.world_size,))
    return {
        "model/cut": distribute_tensor(tensor, mesh, [Shard(0)]),
        "model/copied": distribute_tensor(tensor + 1, mesh, [Replicate()]),
    }


def save_sharded(rank: Rank, root: str) -> None:
    saver = make_saver(rank, root, [])
    saver.start(1, place(rank, torch.arange(35.0).reshape(7, 5)), {}, {})
    saver.wait()
    saver.close()


def load_sharded(rank: Rank, root: str) -> dict[str, Any]:
    tensors = place(rank, torch.zeros(7, 5))
    found = restore.choose(RunDir(root), rank=rank.rank, world_size=rank.world_size, group=rank.control)
    assert found is not None
    restore.load(RunDir(root), found, tensors, {}, group=rank.control)
    return {n: t.full_tensor().tolist() for n, t in tensors.items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("world", [2, 3])
def test_sharded_tensors_are_saved_where_they_are(ranks: Any, tmp_path: Path, world: int) -> None:
    """Every rank saves its own rows of a DTensor, a replicated one is saved once, and other numbers of ranks load them."""
    ranks.run(save_sharded, 2, str(tmp_path))
    found = manifest.read(RunDir(tmp_path), 1)
    assert sorted((c.offsets, c.sizes) for c in found.tensors["model/cut"].chunks) == [
        ((0, 0), (4, 5)),
        ((4, 0), (3, 5)),
    ]
    assert len({c.file for c in found.tensors["model/cut"].chunks}) == 2
    assert len(found.tensors["model/copied"].chunks) == 1
    assert manifest.verify(RunDir(tmp_path), 1) == []
    for loaded in ranks.run(load_sharded, world, str(tmp_path)):
        assert loaded["model/cut"] == torch.arange(35.0).reshape(7, 5).tolist()
        assert loaded["model/copied"] == (torch.arange(35.0) + 1).reshape(7, 5).tolist()
