"""How long a checkpoint stops training: raydist's Saver compared with torch.save by rank 0, in one interleaved run.

    python benchmarks/checkpoint.py [--cycles 9] [--folder DIR]

Two gloo ranks train a GPT of about 100M parameters with AdamW under DDP, one torch thread each. A step's span is from the top
of the loop until its update may start, on the slower rank.

stall_s is the time for which the loop is blocked: the Saver's `start` and `before_update`, or the call of torch.save, which
writes the same tensors from rank 0 while the other rank waits in its next all-reduce. cost_s is the whole cost of a checkpoint:
the span of the step that follows it, including the save, minus the median span of the undisturbed steps around it. On a machine
without a spare core, as here, the copy and the write use CPU time of the ranks' own cores. noise_s is the same difference for an
undisturbed step. Each cycle: undisturbed steps, a Saver checkpoint until its commit, undisturbed steps, a torch.save, undisturbed
steps.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from common import write
from torch.nn.parallel import DistributedDataParallel

from raydist.run.directory import RunDir
from raydist.spec import ModelSpec
from raydist.worker.checkpoint.save import Saver
from raydist.worker.checkpoint.state_dict import TrainState
from raydist.worker.model import gpt
from raydist.worker.parallel import ParamShard

WORLD, VOCAB, CONTEXT, QUIET = 2, 16384, 256, 3


def main(rank: int, port: int, folder: str, cycles: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    model = gpt.build(ModelSpec(layers=12, width=768, heads=12, context=CONTEXT), VOCAB)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    state = TrainState(model, optimizer, {n: ParamShard(p) for n, p in model.named_parameters()})
    events: list[Any] = []
    saver = Saver(
        RunDir(f"{folder}/run"), rank=rank, world_size=WORLD, group=dist.new_group(backend="gloo"), asynchronous=True,
        keep=1, attempt=1, spec_hash="", numbers={}, on_event=events.append,
    )  # fmt: skip
    tokens_BT = torch.randint(VOCAB, (1, CONTEXT + 1))
    steps = 0

    def step(before: Any = None) -> tuple[float, float, float]:
        """(span, whole step, CPU of all threads until the next step) in seconds; `before` is called at its top."""
        nonlocal steps
        dist.barrier()
        begun, cpu = time.perf_counter(), time.process_time()
        if before is not None:
            before()
        logits_BTV = ddp(tokens_BT[:, :-1])
        F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten()).backward()
        saver.before_update()
        span = time.perf_counter() - begun
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps += 1
        return span, time.perf_counter() - begun, time.process_time() - cpu

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
    step(torch_save)  # warm-up: creates the file, as the first save creates the Saver's buffer; not counted
    step(save)
    saver.wait()
    gc.collect()
    gc.freeze()  # as in the training loop
    cycle: list[dict[str, Any]] = []
    for _ in range(cycles):
        first = [step() for _ in range(QUIET)]
        during = [step(save)]
        # All ranks check before each step, so that they leave the loop together.
        while not _everywhere(saver.poll() is not None):
            during.append(step())
        second = [step() for _ in range(QUIET)]
        theirs = step(torch_save)
        os.sync()  # flushes the page cache, so that the next steps are not slowed down by writes
        third = [step() for _ in range(QUIET)]
        result = saver.wait()
        assert result, "the benchmark's own checkpoint failed"
        cycle.append({"quiet": first + second, "during": during, "later": second + third, "torch_save": [theirs],
                      "stood_s": result.stalled, "commit_after_s": result.seconds,
                      "torch_save_call_s": direct[-1] if rank == 0 else 0.0})  # fmt: skip
    saver.close()
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, cycle)
    if rank == 0:
        rows = [_row(_slower(ranks)) for ranks in zip(*every, strict=True)]
        medians = {k: statistics.median(row[k] for row in rows) for k in rows[0]}
        saved = [e.data for e in events if e.kind == "checkpoint_saved"]
        theirs_s = medians["torch_save_cost_s"]
        result = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "state_bytes": saved[-1]["bytes"],
            "ranks": WORLD,
            "cycles": cycles,
            "load_average": os.getloadavg()[1],
            "over_torch_save": {
                "stall": medians["stall_s"] / medians["torch_save_stall_s"],
                "cost": medians["cost_s"] / theirs_s,
                "cost_until_committed": medians["extra_s_until_committed"] / theirs_s,
                "cpu": medians["extra_cpu_s"] / medians["torch_save_extra_cpu_s"],
            },
            "median": medians,
            "every_cycle": rows,
        }
        print(write("checkpoint", _rounded(result)).read_text())
    dist.barrier()
    dist.destroy_process_group()


def _slower(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One cycle of the job: for each step and figure the slower rank's, because the other one waits in the all-reduce."""
    job: dict[str, Any] = {}
    for key, mine in ranks[0].items():
        others = [r[key] for r in ranks]
        if isinstance(mine, float):
            job[key] = max(others)
        else:
            job[key] = [tuple(max(column) for column in zip(*same, strict=True)) for same in zip(*others, strict=True)]
    return job


def _row(job: dict[str, Any]) -> dict[str, float]:
    span, whole, cpu = (statistics.median(column) for column in zip(*job["quiet"], strict=True))
    later_span, _, later_cpu = (statistics.median(column) for column in zip(*job["later"], strict=True))
    during, (theirs,) = job["during"], job["torch_save"]
    return {
        "undisturbed_step_s": whole,
        "noise_s": job["quiet"][0][0] - span,
        "stall_s": job["stood_s"],
        "cost_s": during[0][0] - span,
        "extra_s_until_committed": sum(w - whole for _, w, _ in during),
        "extra_cpu_s": sum(c - cpu for _, _, c in during),
        "steps_beside_the_write": len(during),
        "commit_after_s": job["commit_after_s"],
        "torch_save_stall_s": job["torch_save_call_s"],
        "torch_save_cost_s": theirs[0] - later_span,
        "torch_save_extra_cpu_s": theirs[2] - later_cpu,
    }


def _everywhere(mine: bool) -> bool:
    """Whether the save has ended on every rank. Each rank reports its end only once, so it is remembered."""
    global _ended
    _ended = _ended or mine
    votes = torch.tensor(float(_ended))
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    if bool(votes):
        _ended = False
        return True
    return False


_ended = False


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cycles", type=int, default=9)
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
