"""Trains under random faults of all classes for about a given time, then looks whether anything was lost, doubled or left behind.

    python benchmarks/chaos.py [--seconds 300] [--seed 1]

One host, two gloo ranks, a small GPT, a checkpoint every ten steps, copies in memory as they come. The same run without faults
comes first. Checked: every step has one row, with the samples, the loss and the norm of the undisturbed run, bit for bit; the
weights of the last checkpoint are the same bytes; no process is left. Printed: goodput, which is the time of the steps that
counted over the whole time, and each incident. A driver that was killed is started again by the same command, at once.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from common import write

from raydist import faults
from raydist.faults import Fault
from raydist.records import Event
from raydist.rundir import RunDir
from raydist.runlog import read_events, read_steps
from raydist.worker.checkpoint import manifest

RAYDIST = str(Path(sys.executable).with_name("raydist"))
JOB = {
    "name": "calm",
    "model": {"name": "gpt", "layers": 2, "width": 128, "heads": 4, "context": 128, "dropout": 0.1},
    "data": {"source": "python-stdlib"},
    "train": {"steps": 100, "global_batch": 16, "micro_batch": 4, "seed": 5},
    "checkpoint": {"every": 10, "keep": 3},
    "eval": {"every": None},
    "recovery": {"max_failures": -1, "backoff_s": 0.0, "step_timeout": 3.0, "data_timeout": 2.0},
    "cluster": {"workers": 2},
}
APART = 25
"""Steps from one fault to the next: two checkpoints lie between, so that the run is never taken for one without progress."""
COST_S = 7.0
"""What a fault costs, roughly; for how many there are."""
EXACT = ("step", "loss", "lr", "grad_norm", "tokens", "samples_hash")

KINDS: list[Callable[[int, int], Fault]] = [
    lambda rank, step: faults.Kill(rank=rank, step=step),
    lambda rank, step: faults.Kill(rank=rank, step=step // 10 * 10, phase="save"),
    lambda rank, step: faults.Segfault(rank=rank, step=step, phase="backward"),
    lambda rank, step: faults.Abort(rank=rank, step=step, phase="update"),
    lambda rank, step: faults.Exit(rank=rank, step=step),
    lambda rank, step: faults.Raise(rank=rank, step=step),
    lambda rank, step: faults.Suspend(rank=rank, step=step),
    lambda rank, step: faults.HoldGil(rank=rank, step=step),
    lambda rank, step: faults.Deadlock(rank=rank, step=step),
    lambda rank, step: faults.SkipCollective(rank=rank, step=step),
    lambda rank, step: faults.DiskFull(rank=rank, step=step, operations=1),
    lambda rank, step: faults.ReadOnly(rank=rank, step=step, seconds=0.5),
    lambda rank, step: faults.StorageGone(rank=rank, step=step, seconds=0.5),
    lambda rank, step: faults.SlowStorage(rank=rank, step=step, delay=0.2, seconds=2.0),
    lambda rank, step: faults.DamageCheckpoint(rank=rank, step=step),
    lambda rank, step: faults.StuckData(rank=rank, step=step),
    lambda rank, step: faults.SlowData(rank=rank, step=step, seconds=0.5),
    lambda rank, step: faults.SlowRank(rank=rank, step=step, seconds=0.1, steps=3),
    lambda rank, step: faults.KillAgent(rank=rank, step=step),
    lambda rank, step: faults.KillMonitor(step=step),
    lambda rank, step: faults.KillDriver(step=step),
]


def train(folder: Path, name: str, steps: int, *options: str) -> float:
    """Trains to the end, again and again if it must; seconds."""
    command = [RAYDIST, "train", "job.yaml", "--name", name, "--storage", str(folder), "--address", "local"]
    begun = time.monotonic()
    while True:
        done = subprocess.run([*command, "--set", f"train.steps={steps}", *options], cwd=folder, capture_output=True)
        if done.returncode == 0:
            return time.monotonic() - begun
        if done.returncode != -9:
            sys.exit(f"{name} ended with {done.returncode}:\n{done.stderr.decode()[-3000:]}")


def exact(run: RunDir) -> list[list[Any]]:
    """What must be the same in both runs, step by step."""
    return [[row[name] for name in EXACT] for row in read_steps(run).to_pylist()]


def weights(run: RunDir) -> str:
    """A hash over the model's and the optimizer's tensors of the newest checkpoint."""
    found = manifest.read_newest(run)
    assert found is not None
    digest = hashlib.sha256()
    for name, entry in sorted(found.tensors.items()):
        if name.startswith(("model/", "optim/")):
            for chunk in sorted(entry.chunks, key=lambda c: c.offsets):
                with run.storage.open(manifest.path(found.step, chunk.file)) as source:
                    source.seek(chunk.start)
                    digest.update(source.read(chunk.length))
    return digest.hexdigest()


def incidents(events: list[Event]) -> list[dict[str, Any]]:
    """Each fault, and what came of it: the seconds to the first step after it, where it ended an attempt or a driver."""
    found: list[dict[str, Any]] = []
    for event in events:
        if event.kind == "fault":
            keys = ("fault", "rank", "step")
            found.append({**{key: event.data[key] for key in keys}, "seconds": None, "repeated": None, "cause": ""})
        elif event.kind == "failure" and found:
            found[-1]["cause"] = event.data["cause"]
        elif event.kind == "first_step" and event.data["attempt"] > 1 and found and found[-1]["seconds"] is None:
            found[-1] |= {"seconds": event.data["seconds"], "repeated": event.data["repeated_steps"]}
    return found


def main() -> None:
    """Runs both, compares, prints, writes results/chaos.json; exit code 1 if anything is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    # Processes whose parent has died become ours, so that none escapes the count.
    assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.pop("RAY_ADDRESS", None)
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
        train(folder, "warm", 60)
        pace = sorted(read_steps(RunDir(folder / "warm"))["seconds"].to_pylist())[30]
        count = max(3, int(options.seconds / (COST_S + APART * pace)))
        steps = APART * (count + 1)
        rng = random.Random(options.seed)
        chosen = [rng.choice(KINDS)(rng.randrange(2), APART * (i + 1) + rng.randrange(10)) for i in range(count)]
        (folder / "faults.yaml").write_text(
            yaml.safe_dump([f.model_dump(mode="json", exclude_none=True) for f in chosen])
        )
        train(folder, "calm", steps)
        wall = train(folder, "chaos", steps, "--faults", "faults.yaml")
        calm, chaos = RunDir(folder / "calm"), RunDir(folder / "chaos")
        left = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
        _, alive = psutil.wait_procs(left, timeout=20)
        checks = {
            "every step once, samples and losses as undisturbed": exact(chaos) == exact(calm),
            "weights and optimizer as undisturbed": weights(chaos) == weights(calm),
            "no process left": not alive,
        }
        events = read_events(chaos)
        useful = sum(read_steps(chaos)["seconds"].to_pylist())
        table = incidents(events)
    print(f"{'fault':18s} {'rank':>4s} {'step':>5s} {'first step after':>16s} {'repeated':>8s}  cause")
    for row in table:
        seconds = "-" if row["seconds"] is None else f"{row['seconds']:.1f} s"
        repeated = "-" if row["repeated"] is None else row["repeated"]
        print(f"{row['fault']:18s} {row['rank']:4} {row['step']:5} {seconds:>16s} {repeated:>8}  {row['cause'][:90]}")
    print(f"\n{len(table)} faults in {wall:.0f} s, {steps} steps; goodput {useful / wall:.2f}")
    for check, holds in checks.items():
        print(f"{'ok' if holds else 'FAILED':7s}{check}")
    result = {"seed": options.seed, "steps": steps, "wall_s": wall, "goodput": useful / wall, "checks": checks}
    print(write("chaos", {**result, "incidents": json.loads(json.dumps(table))}))
    sys.exit(0 if all(checks.values()) else 1)


if __name__ == "__main__":
    main()
