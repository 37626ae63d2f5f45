"""What copies of the state in memory cost the training: recovery.snapshot_every auto against null, in one interleaved run.

    python benchmarks/snapshot.py [--rounds 5] [--steps 400] [--width 256] [--layers 6]

Two gloo ranks, one torch thread each, train a GPT with AdamW under DDP through raydist's own loop, without Ray and without
checkpoints. Each round trains so many steps with copies and as many without, in turn first. Of each the time counts from step
WARM, when the pace has taken its measure, to the end: everything is in it, where the loop stands and what runs beside it.

`ratio` is the median over the rounds of (time with) / (time without); 1.01 is what is aimed at. `noise` is the same of runs
without copies against one another. `every` is the interval that the pace chose, `cost_s` and `step_s` what it measured.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import shutil
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp
from common import write

from raydist.cluster.vault import Vault
from raydist.data.prepare import prepare
from raydist.rundir import RunDir
from raydist.spec import JobSpec
from raydist.worker import setup
from raydist.worker.checkpoint import vaultdir
from raydist.worker.checkpoint.vault import VaultJob
from raydist.worker.job import Door, Job
from raydist.worker.loop import train
from raydist.worker.probe import Probe

WORLD, WARM = 2, 60


class Clock(Probe):
    """Notes when each step is done."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[float] = []

    def stepped(self, seconds: float) -> None:
        """A step is done."""
        super().stepped(seconds)
        self.at.append(time.perf_counter())


def main(number: int, port: int, spec: JobSpec, path: str, folder: str | None, told: Any) -> None:
    """One rank of one training; rank 0 tells (seconds from step WARM to the end, what the pace said)."""
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": str(number)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    rank = setup.start(gpus=0, threads=1, timeout_s=120)
    notes: list[str] = []

    def push(records: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
        notes.extend(e["text"] for e in events if e["kind"] == "note" and e["text"].startswith("a copy in memory"))

    clock = Clock()
    job = Job(spec, RunDir(path), str(spec.data.path), vault=VaultJob(folder) if folder else None)
    train(job, rank, Door(push, lambda: None) if rank.first else None, clock)
    setup.stop(rank)
    if rank.first:
        told.put((clock.at[-1] - clock.at[WARM], notes))


def trained(spec: JobSpec, copies: bool) -> tuple[float, list[str]]:
    """One training on WORLD new processes."""
    place = tempfile.mkdtemp(prefix="raydist-")
    vault = Vault(vaultdir.new_folder()) if copies else None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    told = mp.get_context("spawn").SimpleQueue()
    try:
        mp.spawn(main, (port, spec, place, str(vault._folder) if vault else None, told), nprocs=WORLD)
        seconds, notes = told.get()
        return seconds, notes
    finally:
        shutil.rmtree(place)
        if vault is not None:
            vault.close()


def corpus(folder: Path) -> str:
    """Random letters, enough for a few hundred steps."""
    choose = random.Random(3)
    (folder / "a.txt").write_text("\n".join("".join(choose.choices("abcdefgh ", k=400)) for _ in range(4000)))
    prepare([str(folder / "a.txt")], str(folder / "tokens"), eval_fraction=0.05)
    return str(folder / "tokens")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    asked = parser.parse_args()
    if asked.rounds < 2:
        parser.error("--rounds: two at least, for the noise is that of one round against the next")
    scratch = Path(tempfile.mkdtemp(prefix="raydist-"))
    data = corpus(scratch)
    both: dict[bool, list[float]] = {True: [], False: []}
    said: list[str] = []
    try:
        for n in range(asked.rounds):
            for copies in (True, False) if n % 2 else (False, True):
                job = JobSpec.model_validate(
                    {
                        "data": {"path": data},
                        "model": {"layers": asked.layers, "width": asked.width, "heads": 4, "context": 128},
                        "train": {"steps": asked.steps, "global_batch": 8, "micro_batch": 4},
                        "checkpoint": {"every": None},
                        "eval": {"every": None},
                        "recovery": {"snapshot_every": "auto" if copies else None},
                    }
                )
                seconds, notes = trained(job, copies)
                both[copies].append(seconds)
                said += notes[-1:]
    finally:
        shutil.rmtree(scratch)
    paces = [
        [float(x) for x in re.findall(r"every (\d+) steps: each costs ([\d.]+) ms, a step takes ([\d.]+)", s)[0]]
        for s in said
    ]
    every, cost_ms, step_ms = (statistics.median(column) for column in zip(*paces, strict=True))
    result = {
        "ranks": WORLD,
        "rounds": asked.rounds,
        "steps": asked.steps - WARM,
        "width": asked.width,
        "layers": asked.layers,
        "load_average": os.getloadavg()[1],
        "ratio": round(statistics.median(a / b for a, b in zip(both[True], both[False], strict=True)), 4),
        "noise": round(statistics.median(max(a, b) / min(a, b) for a, b in itertools.pairwise(both[False])), 4),
        "every": every,
        "cost_s": cost_ms / 1e3,
        "step_s": step_ms / 1e3,
        "seconds_with": [round(s, 3) for s in both[True]],
        "seconds_without": [round(s, 3) for s in both[False]],
    }
    print(write("snapshot", result).read_text())
