"""A program: one rank of a scenario. Arguments: its name, and its arguments as JSON. Prints what it found as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from raydist.rundir import RunDir
from raydist.worker.checkpoint import restore
from raydist.worker.checkpoint.save import Saver
from raydist.worker.state import TrainState

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def digest(tensors: Mapping[str, Tensor]) -> str:
    """One hash of names and bytes."""
    hasher = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        hasher.update(name.encode() + tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def toy() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, TrainState]:
    """A model whose matrix is large enough to be cut over the ranks, with dropout, under DDP if there are peers."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(300, 1500), nn.Dropout(0.2), nn.Linear(1500, 7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ddp = DistributedDataParallel(model) if WORLD > 1 else model
    return model, ddp, optimizer, TrainState(model, optimizer)


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, saver: Saver | None, step: int) -> None:
    """One update on data that only the step and the rank determine; dropout draws from the rank's own stream."""
    generator = torch.Generator().manual_seed(100 * step + RANK)
    ddp(torch.randn(4, 300, generator=generator)).square().mean().backward()
    if saver is not None:
        saver.before_update()
    optimizer.step()
    optimizer.zero_grad()


def make_saver(root: str, group: Any, events: list[Any], asynchronous: bool = True) -> Saver:
    return Saver(
        RunDir(root), rank=RANK, world_size=WORLD, group=group, asynchronous=asynchronous, keep=10, attempt=1,
        spec_hash="abc", numbers={}, on_event=lambda e: events.append(e.to_dict()),
    )  # fmt: skip


def save(group: Any, root: str, steps: int, asynchronous: bool) -> Any:
    """Trains and saves after each step; two more steps after the last save tell whether a resumed run goes on alike."""
    _, ddp, optimizer, state = toy()
    torch.manual_seed(1000 + RANK)
    events: list[Any] = []
    saver = make_saver(root, group, events, asynchronous)
    digests = {}
    for step in range(1, steps + 1):
        train(ddp, optimizer, saver, step)
        tensors, rank_tensors, plain = state.capture()
        digests[step] = digest(tensors)
        saver.start(step, tensors, rank_tensors, plain)
    result = saver.wait()
    saver.close()
    for step in (steps + 1, steps + 2):
        train(ddp, optimizer, None, step)
    return {"digests": digests, "after": digest(state.capture()[0]), "events": events, "committed": bool(result)}


def load(group: Any, root: str, go_on: bool) -> Any:
    """Restores the newest good checkpoint into a fresh state, and trains two more steps."""
    _, ddp, optimizer, state = toy()
    run = RunDir(root)
    events: list[Any] = []
    found = restore.choose(run, rank=RANK, world_size=WORLD, group=group, on_event=lambda e: events.append(e.to_dict()))
    assert found is not None
    tensors, rank_tensors, _ = state.capture()
    exact = restore.load(run, found, tensors, rank_tensors, group=group)
    state.restore(tensors, rank_tensors if exact else None, found.plain)
    loaded = digest(state.capture()[0])
    if go_on:
        for step in (found.step + 1, found.step + 2):
            train(ddp, optimizer, None, step)
    after = digest(state.capture()[0])
    return {"step": found.step, "digest": loaded, "exact": exact, "after": after, "events": events}


def fail_once(group: Any, root: str) -> Any:
    """Saves steps 1, 2 and 3; at step 2 rank 1 may not write more than 64 KiB into a file."""
    _, ddp, optimizer, state = toy()
    events: list[Any] = []
    saver = make_saver(root, group, events)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write then fails with EFBIG, as on a full disk with ENOSPC
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    results = []
    for step in (1, 2, 3):
        train(ddp, optimizer, saver, step)
        if step == 2 and RANK == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
        saver.start(step, *state.capture())
        saver.before_update()  # the loop goes on as if nothing had happened
        result = saver.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert result is not None
        results.append({"committed": result.committed, "rank": result.failed_rank, "cause": result.cause})
    saver.close()
    return {"results": results, "events": events, "committed": RunDir(root).committed()}


def sharded(group: Any, root: str, loading: bool) -> Any:
    """A DTensor cut unevenly over the ranks and one that all of them hold, saved or loaded."""
    mesh = init_device_mesh("cpu", (WORLD,))
    values = torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5)

    def place(tensor: Tensor) -> dict[str, Tensor]:
        return {
            "model/cut": distribute_tensor(tensor, mesh, [Shard(0)]),
            "model/copied": distribute_tensor(tensor + 1, mesh, [Replicate()]),
        }

    if not loading:
        events: list[Any] = []
        saver = make_saver(root, group, events)
        saver.start(1, place(values), {}, {})
        saver.wait()
        saver.close()
        return events
    tensors = place(torch.zeros(7, 5))
    found = restore.choose(RunDir(root), rank=RANK, world_size=WORLD, group=group)
    assert found is not None
    restore.load(RunDir(root), found, tensors, {}, group=group)
    return {n: t.full_tensor().tolist() for n, t in tensors.items()}  # type: ignore[attr-defined]


def main() -> None:
    torch.set_num_threads(1)
    group = None
    if WORLD > 1:
        dist.init_process_group("gloo", rank=RANK, world_size=WORLD)
        group = dist.new_group(backend="gloo")
    found = globals()[sys.argv[1]](group, **json.loads(sys.argv[2]))
    if WORLD > 1:
        dist.barrier()
        dist.destroy_process_group()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
