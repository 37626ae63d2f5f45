"""A 3 x 3 sweep of tiny jobs, three at a time: `raydist sweep`, the same nine jobs one after another, and plain Ray Tune.

    python benchmarks/sweep.py [--only sweep alone tune]

sweep: `raydist sweep`. alone: nine times `raydist train`. tune: a function trainable that calls `TorchTrainer.fit()`, as in Ray's
documentation, with max_concurrent_trials and almost no CPU for the trial itself, because it may deadlock otherwise; its training
is a bare loop over the same model and batches, without checkpoints, evaluation or records. Measured: wall-clock time of each
command from a cold start, and for `sweep` the seconds from a trial's end to the first step of the next one on its workers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from common import write

RATES, BATCHES = [1e-2, 3e-3, 1e-3], [8, 16, 32]
STEPS, CONTEXT, WIDTH = 60, 64, 64
AT_ONCE = 3
JOB = {
    "name": "tiny",
    "model": {"name": "gpt", "layers": 2, "width": WIDTH, "heads": 2, "context": CONTEXT},
    "data": {"path": "data"},
    "train": {"steps": STEPS, "global_batch": 16, "micro_batch": 8, "seed": 17},
    "eval": {"every": 30, "batches": 2},
    "checkpoint": {"every": 30},
    "cluster": {"workers": 1, "cpus_per_worker": 0.5},
}
SWEEP = {
    "base": "job.yaml",
    "equal": "steps",
    "array": {"parameters": [{"learning_rate": RATES}, {"batch_size": BATCHES}], "concurrent": AT_ONCE},
}

TUNE = f"""
import torch
from ray import train, tune
from ray.train.torch import TorchTrainer, prepare_model
from ray.tune.integration.ray_train import TuneReportCallback

def loop(config):
    from raydist.spec import ModelSpec
    from raydist.worker.model import gpt
    model = prepare_model(gpt.build(ModelSpec(name="gpt", layers=2, width={WIDTH}, heads=2, context={CONTEXT}), 257))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    for _ in range({STEPS}):
        batch = torch.randint(0, 257, (config["batch"], {CONTEXT} + 1))
        logits = model(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    train.report({{"loss": loss.item()}})

def trial(config):
    TorchTrainer(
        loop,
        train_loop_config=config,
        scaling_config=train.ScalingConfig(num_workers=1, resources_per_worker={{"CPU": 0.5}}),
        run_config=train.RunConfig(name=tune.get_context().get_trial_id(), storage_path=STORAGE, callbacks=[TuneReportCallback()]),
    ).fit()

import sys
STORAGE = sys.argv[1]
results = tune.Tuner(
    tune.with_resources(trial, {{"CPU": 0.001}}),
    param_space={{"lr": tune.grid_search({RATES}), "batch": tune.grid_search({BATCHES})}},
    tune_config=tune.TuneConfig(max_concurrent_trials={AT_ONCE}, metric="loss", mode="min"),
    run_config=tune.RunConfig(storage_path=STORAGE, name="plain"),
).fit()
assert len(results) == {len(RATES) * len(BATCHES)} and not results.errors, results.errors
"""


def main() -> None:
    """Prints one JSON object; writes results/sweep.json if all three methods were run."""
    parser = argparse.ArgumentParser()
    ways = {"sweep": sweep, "alone": alone, "tune": plain_tune}
    parser.add_argument("--only", nargs="*", choices=list(ways), default=list(ways))
    asked = parser.parse_args()
    result: dict[str, Any] = {"cells": len(RATES) * len(BATCHES), "at_once": AT_ONCE, "steps": STEPS}
    with tempfile.TemporaryDirectory(prefix="sweep-bench-") as folder:
        root = Path(folder)
        prepare(root)
        for name in asked.only:
            begun = time.monotonic()
            told = ways[name](root)
            result[name] = {"seconds": round(time.monotonic() - begun, 1), **told}
    if set(asked.only) == set(ways):
        for name in ("alone", "tune"):
            result[f"{name}_over_sweep"] = round(result[name]["seconds"] / result["sweep"]["seconds"], 2)
        write("sweep", result)
    print(json.dumps(result, indent=1))


def prepare(root: Path) -> None:
    """Writes the job files and prepares their text."""
    (root / "text").mkdir()
    for number in range(40):
        words = " ".join(str(number * n) for n in range(400))
        (root / "text" / f"{number:02}.txt").write_text(f"document {number}: {words}")
    raydist(root, "data", "prepare", "text", "--out", "data", "--eval-fraction", "0.2")
    (root / "job.yaml").write_text(yaml.safe_dump(JOB))
    (root / "grid.yaml").write_text(yaml.safe_dump(SWEEP))


def sweep(root: Path) -> dict[str, Any]:
    """`raydist sweep`, and how long workers are idle between two trials."""
    raydist(root, "sweep", "grid.yaml", "--storage", "sweeps")
    folder = root / "sweeps" / "grid"
    lines = [line for path in sorted(folder.glob("events/*.jsonl")) for line in path.read_text().splitlines()]
    ended = sorted(event["at"] for event in map(json.loads, lines) if event["kind"] == "finished")
    first = sorted(
        event["at"]
        for path in folder.glob("runs/*/events.jsonl")
        for event in map(json.loads, path.read_text().splitlines())
        if event["kind"] == "first_step"
    )
    gaps = [begins - ends for ends, begins in zip(ended, first[AT_ONCE:], strict=False)]
    return {"gap_s": {"median": round(median(gaps), 2), "max": round(max(gaps), 2)}}


def alone(root: Path) -> dict[str, Any]:
    """Nine runs, one after another."""
    for rate in RATES:
        for batch in BATCHES:
            fields = ["--set", f"optim.lr={rate}", "--set", f"train.global_batch={batch}"]
            raydist(root, "train", "job.yaml", "--name", f"r{rate}-b{batch}", "--storage", "runs", *fields)
    return {}


def plain_tune(root: Path) -> dict[str, Any]:
    """Ray Tune and Ray Train, as in their documentation."""
    (root / "tune.py").write_text(TUNE)
    run(root, [sys.executable, "tune.py", str(root / "tune")])
    return {}


def raydist(root: Path, *arguments: str) -> None:
    run(root, [sys.executable, "-m", "raydist", *arguments])


def run(root: Path, command: list[str]) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_TRAIN_V2_ENABLED": "1"}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


if __name__ == "__main__":
    main()
