"""How long training stands still for a checkpoint: raydist's Saver against torch.save by rank 0, in one interleaved run.

    python benchmarks/checkpoint.py [--cycles 5] [--folder DIR]

Two gloo ranks train a GPT of about 100M parameters with AdamW under DDP, one torch thread each. A step's span is from the top
of the loop to the moment its update may begin. The stall of a checkpoint is the span of the step that follows it, save
included, less the median span of the undisturbed steps just before and after. torch.save writes the same tensors from
rank 0, while the other rank waits in its next all-reduce. What the background write costs the steps beside it is reported
apart. Each cycle: undisturbed steps, a Saver checkpoint until it is committed, undisturbed steps, a torch.save.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from common import write
from torch.nn.parallel import DistributedDataParallel

from raydist.rundir import RunDir
from raydist.spec import ModelSpec
from raydist.worker.checkpoint.save import Saver
from raydist.worker.model import gpt
from raydist.worker.state import TrainState

WORLD, VOCAB, CONTEXT, QUIET = 2, 16384, 256, 3


def main(rank: int, port: int, folder: str, cycles: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    model = gpt.build(ModelSpec(layers=12, width=768, heads=12, context=CONTEXT), VOCAB)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    state = TrainState(model, optimizer)
    events: list[Any] = []
    saver = Saver(
        RunDir(f"{folder}/run"), rank=rank, world_size=WORLD, group=dist.new_group(backend="gloo"), asynchronous=True,
        keep=1, attempt=1, spec_hash="", numbers={}, on_event=events.append,
    )  # fmt: skip
    tokens_BT = torch.randint(VOCAB, (1, CONTEXT + 1))
    steps = 0

    def step(before: Any = None) -> tuple[float, float]:
        """(span, whole step) in seconds; `before` is called at its top."""
        nonlocal steps
        dist.barrier()
        begun = time.perf_counter()
        if before is not None:
            before()
        logits_BTV = ddp(tokens_BT[:, :-1])
        F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten()).backward()
        saver.before_update()
        span = time.perf_counter() - begun
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps += 1
        return span, time.perf_counter() - begun

    def save() -> None:
        tensors, rank_tensors, plain = state.capture()
        saver.start(steps, tensors, rank_tensors, plain)

    def torch_save() -> None:
        if rank == 0:
            begun = time.perf_counter()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/torch.pt")
            direct.append(time.perf_counter() - begun)

    direct: list[float] = []
    for _ in range(3):
        step()
    tensors, rank_tensors, _ = state.capture()
    saver.prepare(tensors, rank_tensors)
    step(torch_save)  # its file exists from here on, as does the Saver's buffer: the first of each is not counted
    step(save)
    saver.wait()
    ours: list[float] = []
    theirs: list[float] = []
    quiet: list[float] = []
    beside: list[float] = []
    counts: list[int] = []
    for _ in range(cycles):
        first = [step() for _ in range(QUIET)]
        span_ours, whole_ours = step(save)
        during = [(span_ours, whole_ours)]
        while not _everywhere(saver.poll() is not None, during):
            during.append(step())
        saver.wait()
        second = [step() for _ in range(QUIET)]
        span_theirs, _ = step(torch_save)
        third = [step() for _ in range(QUIET)]
        around = statistics.median(s for s, _ in first + second)
        ours.append(span_ours - around)
        theirs.append(span_theirs - statistics.median(s for s, _ in second + third))
        quiet += [w for _, w in first + second + third]
        usual = statistics.median(w for _, w in first + second)
        beside.append(sum(w - usual for _, w in during))
        counts.append(len(during))
    saver.close()
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, (ours, theirs, beside))
    if rank == 0:
        saved = [e.data for e in events if e.kind == "checkpoint_saved"]
        # Ranks wait for one another in the all-reduce: a checkpoint costs what it costs the slower one.
        slower = [max(of_ranks) for of_ranks in zip(*(e[0] for e in every), strict=True)]
        slower_theirs = [max(of_ranks) for of_ranks in zip(*(e[1] for e in every), strict=True)]
        ratio = statistics.median(slower) / statistics.median(slower_theirs)
        result = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "state_bytes": saved[-1]["bytes"],
            "ranks": WORLD,
            "cycles": cycles,
            "undisturbed_step_s": statistics.median(quiet),
            "stall_s": {"median": statistics.median(slower), "all": slower},
            "torch_save_stall_s": {"median": statistics.median(slower_theirs), "all": slower_theirs},
            "torch_save_call_s": statistics.median(direct[1:]),
            "stall_over_torch_save": ratio,
            "background_s": statistics.median(e["seconds"] for e in saved[1:]),
            "steps_beside_the_write": statistics.median(counts),
            "extra_seconds_of_all_steps_from_start_to_commit": {
                "median": statistics.median(max(b) for b in zip(*(e[2] for e in every), strict=True)),
                "over_torch_save": statistics.median(max(b) for b in zip(*(e[2] for e in every), strict=True))
                / statistics.median(slower_theirs),
            },
        }
        print(write("checkpoint", _rounded(result)).read_text())
    dist.barrier()
    dist.destroy_process_group()


def _everywhere(mine: bool, during: list[Any]) -> bool:
    """Whether every rank says so, after ten steps at most."""
    votes = torch.tensor(float(mine))
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes) or len(during) >= 10


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    asked = parser.parse_args()
    place = tempfile.mkdtemp(prefix="raydist-", dir=asked.folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    try:
        mp.spawn(main, (free_port, place, asked.cycles), nprocs=WORLD)
    finally:
        shutil.rmtree(place)
