"""Recovery from a dead node and from a drained node, compared with the peers: seconds to the first new step, and steps lost.

    python benchmarks/nodes.py [--rounds 3]

Two hosts in network namespaces with one rank each; a checkpoint every 20 steps. After 30 forward passes on both there is a fault:
"kill" kills all processes of the second host, including its raylet or torchrun; "drain" runs `ray drain-node` for it, or sends
SIGTERM to its torchrun. Plain Ray Train keeps using a draining node until it is gone, which is 20 steps later; its time counts
from then. raydist (`cluster.workers: [1, 2]`) and torchrun (`--nnodes 1:2`) continue with one rank; plain Ray Train continues
with two on the first host, because its number is fixed. The time ends with rank 0's first whole step in its new process, by the
model's forward; `lost` are the steps that are trained again. raydist's drain time includes the `ray drain-node` command. A peer
that has not recovered after 120 s counts as 120. Needs root, or permission to create user namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import write
from recovery import AT, BIN, EVERY, NAMES, PEERS, STEPS, command, forwards, recovered, steps_done, wait

from tests.hosts import Cluster, Hosts, Process

CASES = [(fault, name) for fault in ("kill", "drain") for name in NAMES]
LIMIT_S = 120.0


def started(peer: str, out: str, storage: str, hosts: Hosts, env: dict[str, str]) -> list[Process]:
    """Starts the commands of one run. The first process is the one to wait for."""
    if peer == "torchrun":
        options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
        meet = ["--rdzv-id", "peer", "--rdzv-endpoint", f"{hosts[0].ip}:29400"]
        script = ["recovering.py", "torchrun", out, str(STEPS), str(EVERY)]
        asked = [[str(BIN / "torchrun"), *options, *meet, "--local-addr", host.ip, *script] for host in hosts]
    else:
        asked = [command(peer, out, storage)]
    if peer == "raydist":
        where = asked[0].index("local")
        asked[0][where : where + 1] = [env["RAY_ADDRESS"], "--set", "cluster.workers=[1, 2]"]
    quiet = subprocess.DEVNULL
    return [
        host.popen(line, env=env, cwd=str(PEERS), stdout=quiet, stderr=subprocess.PIPE if i == 0 else quiet)
        for i, (host, line) in enumerate(zip(hosts, asked, strict=False))
    ]


def run(fault: str, peer: str, storage: str) -> dict[str, float]:
    """One run with one fault, on new hosts: seconds to the first new step, and steps lost."""
    shutil.rmtree(
        f"{storage}/peers", ignore_errors=True
    )  # the lease of a driver that died with its host is valid for 30 s
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    env |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": str(PEERS)}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        out, hosts = f"{folder}/out", stack.enter_context(Hosts(2))
        cluster = None
        if peer != "torchrun":
            cluster = stack.enter_context(Cluster(hosts, cpus=2 if peer == "ray train" else 1))
            env |= {**cluster.environment, "RAY_AUTH_MODE": "token", "RAY_ADDRESS": cluster.address}
        process, *others = started(peer, out, storage, hosts, env)

        def until(count: int) -> None:
            def there() -> bool | None:
                return all(len(forwards(out, rank)) >= count for rank in (0, 1)) or None

            assert wait(there, process, LIMIT_S), f"no {count} steps in two minutes"

        until(AT)
        before, done = {pid for _, pid in forwards(out, 0)}, steps_done(peer, out)
        begun = time.time()
        if fault == "kill":
            hosts[1].kill()
        elif peer == "torchrun":
            others[0].terminate()
        else:
            assert cluster is not None
            drain = ["drain-node", "--address", cluster.address, "--node-id", cluster.node_ids()[hosts[1].name]]
            why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "-"]
            why += ["--deadline-remaining-seconds", "60"]
            drained = hosts[0].run([str(BIN / "ray"), *drain, *why], env=env)
            assert drained.returncode == 0, drained.stderr
            if peer == "ray train":
                until(AT + EVERY)
                done, begun = steps_done(peer, out), time.time()
                hosts[1].kill()
        return recovered(peer, process, out, storage, before, done, begun, LIMIT_S)


def main() -> None:
    """Runs, prints the table, writes results/nodes.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as storage:
        warm = [*command("raydist", f"{storage}/warm", storage), "--until", "1"]
        subprocess.run(warm, cwd=PEERS, check=True, stdout=subprocess.DEVNULL)  # the corpus is prepared once
        for i in range(options.rounds):
            shift = i % len(CASES)
            rounds.append({f"{f}, {peer}": run(f, peer, storage) for f, peer in CASES[shift:] + CASES[:shift]})
            print(f"round {i + 1}: {rounds[-1]}", flush=True)
    table = {
        f"{f}, {peer}": {
            figure: statistics.median(r[f"{f}, {peer}"][figure] for r in rounds) for figure in ("seconds", "lost")
        }
        for f, peer in CASES
    }
    for case, row in table.items():
        print(f"{case:18s} {row['seconds']:8.2f} s {row['lost']:4.0f} steps lost")
    print(write("nodes", {"rounds": rounds, "medians": table}))


if __name__ == "__main__":
    main()
