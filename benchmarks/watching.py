"""Cost of monitoring: tokens/s of `raydist train` with monitoring, divided by tokens/s without it, in one run.

    python benchmarks/watching.py [--rounds 6] [--stretches 20]

Two runs of the same command differ by more than 1%: their memory layout differs, and so does other load on the machine. So within
each run, stretches of STRETCH steps with and without monitoring alternate (2.8 s each on the reference machine). Without: as with
`observe.interval_s: null`, the ranks count no collectives and send nothing, and the node monitor, which runs in the driver of a
private Ray, reads and sends nothing. Model, batch and threads are the same as in peers.py.

`pace`: steps/s of a stretch with monitoring, divided by the mean of its two neighbours without. `processor`: the same ratio for
both ranks' processor time per step, which other load affects little. For each: the mean with its 95% interval (normal).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from common import write
from peers import PEERS
from watched_model import STRETCH, WARM

DRIVER = """
import sys
from pathlib import Path
from raydist.cli.main import main
from raydist.observe.node_monitor import NodeMonitor

off, read, send = Path(sys.argv.pop(1)), NodeMonitor.read, NodeMonitor._send
NodeMonitor.read = lambda self: [] if off.exists() else read(self)
NodeMonitor._send = lambda self: None if off.exists() else send(self)
main()
"""


def trained(folder: Path, stretches: int) -> tuple[list[float], list[float]]:
    """(pace, processor time) ratios of one run: stretches with monitoring over their neighbours without."""
    out = folder / "out"
    steps = WARM + (2 * stretches + 1) * STRETCH + 2
    command = [sys.executable, "-c", DRIVER, f"{out}.off", "train", "job.yaml", "--address", "local"]
    command += ["--storage", str(folder / "runs"), "--set", "model.name=watched_model:build"]
    command += ["--set", f"model.options={{out: {out}}}", "--set", f"train.steps={steps}"]
    env = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    env.pop("RAY_ADDRESS", None)
    done = subprocess.run(command, cwd=PEERS, env=env, capture_output=True)
    if done.returncode:
        sys.exit(done.stderr.decode()[-3000:])
    ranks = [
        [tuple(map(float, line.split())) for line in Path(f"{out}.{r}.turns").read_text().splitlines()] for r in (0, 1)
    ]
    at = [time for time, _ in ranks[0]]
    spent = [a + b for (_, a), (_, b) in zip(*ranks, strict=True)]
    return ratios(at, inverse=True), ratios(spent)


def ratios(marks: list[float], inverse: bool = False) -> list[float]:
    """Every second interval between marks, divided by the mean of its two neighbours."""
    lengths = [b - a for a, b in pairwise(marks)]
    found = [2 * lengths[i] / (lengths[i - 1] + lengths[i + 1]) for i in range(1, len(lengths) - 1, 2)]
    return [1 / ratio for ratio in found] if inverse else found


def mean(values: list[float]) -> dict[str, Any]:
    """The mean, with its 95% interval."""
    middle, half = statistics.mean(values), 1.96 * statistics.stdev(values) / len(values) ** 0.5
    return {"ratio": round(middle, 4), "low": round(middle - half, 4), "high": round(middle + half, 4)}


def main() -> None:
    """Runs, prints the figures, writes results/watching.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6, help="runs, each on new processes")
    parser.add_argument("--stretches", type=int, default=20, help="with monitoring, in each run")
    asked = parser.parse_args()
    paces: list[float] = []
    processor: list[float] = []
    for number in range(asked.rounds):
        with tempfile.TemporaryDirectory() as folder:
            pace, spent = trained(Path(folder), asked.stretches)
        paces += pace
        processor += spent
        print(
            f"round {number + 1}: pace {statistics.mean(pace):.4f}, processor {statistics.mean(spent):.4f}", flush=True
        )
    result = {"rounds": asked.rounds, "stretches": len(paces), "pace": mean(paces), "processor": mean(processor)}
    print(write("watching", result).read_text())


if __name__ == "__main__":
    main()
