"""Real cost of memory checkpoints, relative to the estimate that chooses their interval.

    python benchmarks/snapshot.py [--rounds 3] [--stretches 8] [--share 0.1] [--width 256] [--layers 6]

Two gloo ranks, one torch thread each, train a GPT with AdamW under DDP through raydist's own loop, without Ray and without
checkpoints. In each training, stretches of BLOCK steps with copies (recovery.snapshot_every: auto) and without them alternate: a
stretch is too short for drift of the machine, and nothing else differs. No copy is taken in the last GAP steps of a stretch, so
that all of a copy's cost falls into its own stretch.

A run spends 1% of its time on copies, which is less than the differences between stretches. Here it spends `--share`, so that
there are more copies. `share`: the extra time of a stretch with copies over its neighbours without, divided by their time for its
steps. `believed`: the estimate of the same: number of copies times their estimated cost. `ratio`: share over believed, with its
95% interval (normal, over stretches). `percent`: the resulting share in a run, which aims at AIM of its 1%: calculated, not
measured.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp
from common import write

from raydist.checkpoint import memory_layout
from raydist.cluster.run.memory_store import MemoryStore
from raydist.data.prepare import prepare
from raydist.ipc.heartbeat import Heartbeat
from raydist.run.directory import RunDir
from raydist.spec import JobSpec
from raydist.worker import distributed
from raydist.worker.attempt import Job, MonitorChannel
from raydist.worker.checkpoint import memory_manager as memory_store_module
from raydist.worker.checkpoint import snapshot_interval
from raydist.worker.checkpoint.memory_manager import MemoryStoreJob
from raydist.worker.checkpoint.snapshot_interval import SnapshotInterval
from raydist.worker.loop import train

WORLD, WARM, BLOCK, GAP = 2, 60, 40, 3


class AlternatingInterval(SnapshotInterval):
    """A SnapshotInterval that takes no copies in every second stretch, and counts the steps of the others only."""

    newest: AlternatingInterval
    """The last instance in this process."""

    def __init__(self, every: Any, newest: int = 0) -> None:
        super().__init__(every, newest)
        self.copies: list[tuple[int, float]] = []
        """(step, estimated cost at that time) of each copy."""
        AlternatingInterval.newest = self

    def due(self, step: int) -> bool:
        """As SnapshotInterval's, in stretches with copies."""
        return on(step) and super().due(counted(step))

    def taken(self, step: int, checkpoint: bool = False) -> None:
        """As SnapshotInterval's."""
        super().taken(counted(step), checkpoint)
        self.copies.append((step, self.cost or 0.0))


def on(step: int) -> bool:
    """Whether a copy may be taken after this step."""
    return step < WARM or ((step - WARM) // BLOCK % 2 == 1 and (step - WARM) % BLOCK < BLOCK - GAP)


def counted(step: int) -> int:
    """Number of steps so far in which copies are allowed."""
    if step < WARM:
        return step
    pairs, rest = divmod(step - WARM, 2 * BLOCK)
    return WARM + pairs * (BLOCK - GAP) + min(max(rest - BLOCK, 0), BLOCK - GAP)


class Clock(Heartbeat):
    """Records the end of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[float] = []

    def stepped(self, seconds: float) -> None:
        """Called at the end of a step."""
        super().stepped(seconds)
        self.at.append(time.perf_counter())


def rank_main(number: int, port: int, spec: JobSpec, path: str, folder: str, share: float, told: Any) -> None:
    """One rank of one training; rank 0 puts (end of each step, the copies, seconds of an undisturbed step)."""
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": str(number)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    memory_store_module.SnapshotInterval, snapshot_interval.SHARE = AlternatingInterval, share
    rank = distributed.start(gpus=0, threads=1, timeout_s=120)
    clock = Clock()
    job = Job(spec, RunDir(path), str(spec.data.path), memory_store=MemoryStoreJob(folder))
    train(job, rank, MonitorChannel(lambda records, events: None, lambda: None) if rank.first else None, clock)
    distributed.stop(rank)
    if rank.first:
        told.put((clock.at, AlternatingInterval.newest.copies, AlternatingInterval.newest.base))


def trained(spec: JobSpec, share: float) -> tuple[list[float], list[tuple[int, float]], float]:
    """One training on WORLD new processes."""
    place = tempfile.mkdtemp(prefix="raydist-")
    memory_store = MemoryStore(memory_layout.new_folder())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    told = mp.get_context("spawn").SimpleQueue()
    try:
        mp.spawn(rank_main, (port, spec, place, str(memory_store._folder), share, told), nprocs=WORLD)
        return told.get()
    finally:
        shutil.rmtree(place)
        memory_store.close()


def corpus(folder: Path) -> str:
    """Random letters, enough for a few hundred steps."""
    choose = random.Random(3)
    (folder / "a.txt").write_text("\n".join("".join(choose.choices("abcdefgh ", k=400)) for _ in range(4000)))
    prepare([str(folder / "a.txt")], str(folder / "tokens"), eval_fraction=0.05)
    return str(folder / "tokens")


def shares(at: list[float], copies: list[tuple[int, float]], stretches: int) -> list[tuple[float, float, int]]:
    """For each stretch with copies: (share, estimated share, number of copies). `at[s - 1]`: end of step s."""
    found = []
    edge = [WARM + i * BLOCK for i in range(2 * stretches + 2)]
    for i in range(1, 2 * stretches, 2):
        before, begin, end, after = (at[edge[j] - 1] for j in (i - 1, i, i + 1, i + 2))
        base = ((begin - before) + (after - end)) / (2 * BLOCK)
        open_to_copies = (BLOCK - GAP) * base
        costs = [cost for step, cost in copies if edge[i] <= step < edge[i + 1]]
        found.append((((end - begin) - BLOCK * base) / open_to_copies, sum(costs) / open_to_copies, len(costs)))
    return found


def main() -> None:
    """Runs, prints the figures, writes results/snapshot.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="trainings, each on new processes")
    parser.add_argument("--stretches", type=int, default=8, help="with copies, in each training")
    parser.add_argument("--share", type=float, default=0.1, help="of the time that copies may take here")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    asked = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="raydist-"))
    rows: list[tuple[float, float, int]] = []
    bases = []
    try:
        job = JobSpec.model_validate(
            {
                "data": {"path": corpus(scratch)},
                "model": {"layers": asked.layers, "width": asked.width, "heads": 4, "context": 128},
                "train": {"steps": WARM + (2 * asked.stretches + 1) * BLOCK, "global_batch": 8, "micro_batch": 4},
                "checkpoint": {"every": None},
                "eval": {"every": None},
                "recovery": {"snapshot_every": "auto"},
            }
        )
        for number in range(asked.rounds):
            at, copies, base = trained(job, asked.share)
            bases.append(base)
            rows += shares(at, copies, asked.stretches)
            print(
                f"round {number + 1}: " + "  ".join(f"{share:+.3f}" for share, *_ in rows[-asked.stretches :]),
                flush=True,
            )
    finally:
        shutil.rmtree(scratch)
    share, believed, taken = ([*column] for column in zip(*rows, strict=True))
    middle, half = statistics.mean(share), 1.96 * statistics.stdev(share) / len(share) ** 0.5
    belief = statistics.mean(believed)
    result = {
        "ranks": WORLD,
        "width": asked.width,
        "layers": asked.layers,
        "rounds": asked.rounds,
        "stretches": len(rows),
        "steps_a_copy": round(len(rows) * (BLOCK - GAP) / sum(taken), 1),
        "step_s": round(statistics.median(bases), 4),
        "share": round(middle, 4),
        "believed": round(belief, 4),
        "ratio": round(middle / belief, 3),
        "low": round((middle - half) / belief, 3),
        "high": round((middle + half) / belief, 3),
        "percent": [round(snapshot_interval.AIM * (middle + each) / belief, 3) for each in (0, -half, half)],
        "shares": [round(each, 4) for each in share],
    }
    print(write("snapshot", result).read_text())


if __name__ == "__main__":
    main()
