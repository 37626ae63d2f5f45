"""SIGKILL and SIGSTOP of each rank of meshes of four ranks: the run ends with the bits of an undisturbed one.

    python benchmarks/mesh_faults.py [--meshes "dp 2 x tensor 2" ...]

`raydist train` on this machine: dp 2 x tensor 2, dp 2 x pipeline 2, tensor 2 x pipeline 2, dp 4 whose ranks share the experts of
each layer, and dp 2 x context 2. In a run without faults, and in one in which each rank gets SIGKILL and SIGSTOP in turn, in other
phases of a step. A copy in memory at every second step; the only checkpoint is that of the last one. The result of a mesh replaces
that of the same mesh in the file, and leaves the others.

Checked: each failure names the rank and what happened to it; each attempt continues from a copy in memory, made since the fault
before; every step has one row, whose samples, loss and norm equal those of the undisturbed run, bit for bit; so do weights and
optimizer state. Nothing is timed. tests/faults/test_mesh.py has a part of it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from chaos import JOB, Here, differences, newest, train
from common import write

from raydist.faults import Kill, Suspend
from raydist.run.directory import RunDir
from raydist.run.log import read_events

ROOT = Path(__file__).parents[1]
GPT = {**JOB["model"], "width": 32, "context": 32}
EXPERTS = {"name": "mixtral", "layers": 2, "width": 16, "heads": 2, "hidden": 16, "context": 32}
MESHES: dict[str, dict[str, Any]] = {
    "dp 2 x tensor 2": {"parallel": {"strategy": "zero1", "tensor": 2}, "model": GPT},
    "dp 2 x pipeline 2": {"parallel": {"strategy": "zero3", "pipeline": 2}, "model": GPT},
    "tensor 2 x pipeline 2": {"parallel": {"tensor": 2, "pipeline": 2}, "model": GPT},
    "dp 4 with expert 4": {"parallel": {"strategy": "zero2", "expert": 4}, "model": EXPERTS},
    "dp 2 x context 2": {"parallel": {"strategy": "zero1", "context": 2}, "model": GPT},
}
RANKS, APART = 4, 6
"""Steps from one fault to the next: the first steps of an attempt have no time limit, and copies, of every second step, are made
while the next steps are computed, and count once all ranks have theirs."""
PHASES = ("forward", "backward", "update")


def faults() -> list[Kill | Suspend]:
    """SIGKILL of each rank, then SIGSTOP of each."""
    made: list[Kill | Suspend] = []
    for kind in (Kill, Suspend):
        for rank in range(RANKS):
            made.append(kind(rank=rank, step=APART * (len(made) + 1), phase=PHASES[len(made) % len(PHASES)]))
    return made


def of_mesh(sections: dict[str, Any], folder: Path) -> tuple[list[dict[str, Any]], dict[str, bool]]:
    """The faults with what followed, and the checks."""
    recovery = {**JOB["recovery"], "snapshot_every": 2, "step_timeout": 5.0}
    job = {
        **JOB,
        "recovery": recovery,
        "checkpoint": {"every": 1000},
        "cluster": {"workers": RANKS, "cpus_per_worker": 0.5},
        **sections,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    asked = faults()
    (folder / "faults.yaml").write_text(yaml.safe_dump([each.model_dump(mode="json") for each in asked]))
    steps = APART * (len(asked) + 1)
    train(Here(), folder, "calm", steps)
    train(Here(), folder, "faults", steps, "--faults", "faults.yaml")
    calm, run = RunDir(folder / "calm"), RunDir(folder / "faults")
    events = read_events(run)
    failures = [event.data for event in events if event.kind == "failure"]
    resumed = [event.data for event in events if event.kind == "resumed"]
    first = [event.data for event in events if event.kind == "first_step"][1:]
    named = {"kill": "SIGKILL", "suspend": "stopped (SIGSTOP)"}
    table = [
        {
            "fault": fault.fault, "rank": fault.rank, "step": fault.step, "phase": fault.phase,
            "cause": failure["cause"].replace(f"{ROOT}/", ""),
            "source": again["source"], "from": again["step"], "seconds": back["seconds"],
        }
        for fault, failure, again, back in zip(asked, failures, resumed, first, strict=False)
    ]  # fmt: skip
    checks = {
        "each failure names its rank and its cause": [failure["rank"] for failure in failures]
        == [fault.rank for fault in asked]
        and all(named[row["fault"]] in row["cause"] for row in table),
        "from a memory copy, made since the fault before": all(
            row["source"] == "memory" and 0 < row["step"] - row["from"] <= APART for row in table
        ),
        "every step once, samples and losses as undisturbed": not differences(run, calm),
        "weights and optimizer as undisturbed": newest(run) == newest(calm),
    }
    return table, checks


def main() -> None:
    """Runs them, prints and writes the results. Exit code 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--meshes", nargs="+", choices=list(MESHES), default=list(MESHES))
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.pop("RAY_ADDRESS", None)
    result: dict[str, Any] = {}
    for mesh in options.meshes:
        with tempfile.TemporaryDirectory() as folder:
            table, checks = of_mesh(MESHES[mesh], Path(folder))
        result[mesh] = {"faults": table, "checks": checks}
        print(f"{mesh}: {len(table)} faults")
        for row in table:
            place = f"rank {row['rank']} step {row['step']:3d} {row['phase']:9s}"
            print(f"  {row['fault']:8s} {place} from {row['from']:3d} ({row['source']}) {row['cause'][:80]}")
        for check, holds in checks.items():
            print(f"  {'ok' if holds else 'FAILED':7s}{check}", flush=True)
    print(write("mesh_faults", {"meshes": result}, merge=True))
    sys.exit(0 if all(holds for each in result.values() for holds in each["checks"].values()) else 1)


if __name__ == "__main__":
    main()
