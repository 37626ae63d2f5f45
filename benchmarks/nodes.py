"""A node that dies, and one that is drained: from the fault to the end of the first new step, and the steps lost.

    python benchmarks/nodes.py [--rounds 3]

Two hosts in network namespaces are a Ray cluster, each with one CPU and one rank; `cluster.workers: [1, 2]`, a checkpoint every 20
steps. In the 30th step of the rank on the second host, either all of that host's processes are killed, raylet too, or Ray is told
to drain it. The run goes on with one rank. The time ends with that rank's first whole step in its new process, by the model's own
forward; `lost` are the steps trained once more. Needs root, or the right to make user namespaces.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import write
from recovery import AT, BIN, LIMIT_S, PEERS, command, forwards, repeated, wait

from tests.hosts import Cluster, Hosts

FAULTS = ["kill", "drain"]


def run(fault: str, storage: str) -> dict[str, float]:
    """One run with one fault, on a cluster of its own: seconds to the first new step, and steps lost."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    env |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(PEERS)}
    with tempfile.TemporaryDirectory() as folder, Hosts(2) as hosts, Cluster(hosts) as cluster:
        out, env = f"{folder}/out", env | cluster.environment
        asked = [cluster.address if word == "local" else word for word in command("raydist", out, storage)]
        process = hosts[0].popen(
            [*asked, "--set", "cluster.workers=[1, 2]"],
            env=env, cwd=str(PEERS), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        wait(lambda: True if all(len(forwards(out, rank)) >= AT for rank in (0, 1)) else None, process, LIMIT_S)
        before = {(rank, pid) for rank in (0, 1) for _, pid in forwards(out, rank)}
        begun = time.time()
        if fault == "kill":
            cluster.kill_node(hosts[1])
        else:
            node = cluster.node_ids()[hosts[1].name]
            drain = [str(BIN / "ray"), "drain-node", "--address", cluster.address, "--node-id", node]
            why = [
                "--reason",
                "DRAIN_NODE_REASON_PREEMPTION",
                "--reason-message",
                "to be taken",
                "--deadline-remaining-seconds",
                "60",
            ]
            begun = time.time()
            done = hosts[0].run([*drain, *why], env=env)
            assert done.returncode == 0, done.stderr

        def back() -> float | None:
            new = [at for at, pid in forwards(out, 0) if (0, pid) not in before and at > begun]
            return new[1] if len(new) > 1 else None

        first = wait(back, process, LIMIT_S)
        return {"seconds": (first or begun + LIMIT_S) - begun, "lost": repeated(storage)}


def main() -> None:
    """Runs, prints the table, writes results/nodes.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as storage:
        warm = [*command("raydist", f"{storage}/warm", storage), "--until", "1"]
        subprocess.run(warm, cwd=PEERS, check=True, stdout=subprocess.DEVNULL)  # the corpus is prepared once
        for i in range(options.rounds):
            rounds.append({fault: run(fault, storage) for fault in FAULTS})
            print(f"round {i + 1}: {rounds[-1]}", flush=True)
    medians = {
        fault: {figure: statistics.median(r[fault][figure] for r in rounds) for figure in ("seconds", "lost")}
        for fault in FAULTS
    }
    print(medians)
    print(write("nodes", {"rounds": rounds, "medians": medians}))


if __name__ == "__main__":
    main()
