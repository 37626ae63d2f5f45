"""What being watched costs: tokens/s of `raydist train` with observe.interval_s 1.0 over null, in one interleaved run.

    python benchmarks/observe.py [--rounds 5] [--strategy ddp]

Two gloo ranks of one thread train the peers' model on a private Ray; the meter sits in its forward. On: each rank counts its
collectives and tells its node every second, an agent reads the node's hardware, and the monitor stores all of it. Each round has
both, beginning with the other one each time; the ratio is of the same round, and the median over the rounds is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from common import write
from peers import PEERS, TOKENS, command

CASES = {"off": "null", "on": "1.0"}


def run(case: str, strategy: str, storage: str) -> float:
    """Tokens/s of one run."""
    env = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    env.pop("RAY_ADDRESS", None)
    with tempfile.TemporaryDirectory() as folder:
        asked = command(f"raydist {strategy}", f"{folder}/out", time.time(), storage)
        asked += ["--set", f"observe.interval_s={CASES[case]}"]
        done = subprocess.run(asked, cwd=PEERS, env=env, capture_output=True, timeout=300)
        if done.returncode:
            sys.exit(f"{case} failed:\n{done.stderr.decode()[-3000:]}")
        steps = [json.loads(Path(f"{folder}/out.{rank}.json").read_text())["step_ms"] for rank in (0, 1)]
    return TOKENS / max(steps) * 1e3


def main() -> None:
    """Runs, prints the ratio, writes results/observe.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--strategy", default="ddp")
    options = parser.parse_args()
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as storage:
        run("on", options.strategy, storage)  # prepares the corpus
        for i in range(options.rounds):
            names = list(CASES)[:: 1 if i % 2 else -1]
            rounds.append({case: run(case, options.strategy, storage) for case in names})
            print(f"round {i + 1}: {rounds[-1]['on'] / rounds[-1]['off']:.3f}", flush=True)
    ratio = statistics.median(r["on"] / r["off"] for r in rounds)
    print(f"\n{options.strategy}: on over off {ratio:.3f}")
    print(write("observe", {"strategy": options.strategy, "rounds": rounds, "ratio": ratio}))


if __name__ == "__main__":
    main()
