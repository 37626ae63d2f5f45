"""Memory of a node's processes, and seconds from a killed rank to the first new step, with one import of torch and with many.

    python benchmarks/fork_servers.py [--rounds 3] [--ranks 8]

`raydist train` on a private Ray, gloo ranks of one thread with the model of peers/. Three modes take turns:

    driver    every fork server is forked from one zygote, which the driver starts: a private Ray
    node      every fork server is forked from one zygote, which the first agent starts: a cluster
    own       every agent starts its own fork server, which imports torch: a cluster's node of one rank

Memory is taken in rank 0's 10th step, from /proc/PID/smaps_rollup, summed over the processes of each kind: PSS divides a shared
page among its users, USS (private pages) is what the end of the process alone would free. `pages` is the size of the page tables
(VmPTE in /proc/PID/status), which no PSS counts. Then rank 1 gets SIGKILL.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))
from common import write
from recovery import LIMIT_S, PEERS, forwards, recovered, wait

MODES = ("driver", "node", "own")
KINDS = ("zygote", "fork server", "rank", "agent")
AT = 10
_NO_ZYGOTE = """
from types import SimpleNamespace
from raydist.cluster import session
from raydist.launch.zygote import variables
known = {"node": {}, "own": variables("", {}, [])}  # own: one that preloads nothing, which no agent uses
session.start_zygote = lambda folder, env: SimpleNamespace(variables=known[MODE], close=lambda: None)
"""
_COMMAND = "from raydist.cli.main import main; import sys; sys.exit(main())"


def command(mode: str, ranks: int, out: str, storage: str) -> list[str]:
    """One run without an end of its own."""
    sets = {
        "model.options": f"{{out: {out}}}",
        "train.steps": 100_000,
        "train.global_batch": 8 * ranks,  # the model notes the forwards of 8 sequences
        "cluster.workers": ranks,
        "cluster.cpus_per_worker": 1 / ranks,
        "recovery.snapshot_every": "null",
    }
    options = [part for name, value in sets.items() for part in ("--set", f"{name}={value}")]
    code = ("" if mode == "driver" else f"MODE = {mode!r}{_NO_ZYGOTE}") + _COMMAND
    run = [sys.executable, "-c", code, "train", "job.yaml", "--fresh", "--storage", storage, "--address", "local"]
    return [*run, *options]


def kind(process: psutil.Process, ranks: set[int]) -> str | None:
    """Which of KINDS a process is; None: another one of Ray or raydist."""
    line = " ".join(process.cmdline())
    if process.pid in ranks:
        return "rank"
    if any(child.pid in ranks for child in process.children()):
        return "fork server"
    if "raydist.launch.zygote" in line:
        return "zygote"
    return "agent" if line.startswith("ray::") and "RayTrainWorker" in line else None


def memory(driver: psutil.Process, ranks: set[int]) -> dict[str, dict[str, float]]:
    """Kind -> number of processes, and MiB of PSS, USS, RSS and page tables of all of them."""
    sums: dict[str, dict[str, float]] = {}
    for process in driver.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            found = kind(process, ranks)
            if found is None:
                continue
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            kib = {name: int(n) for name, n in re.findall(r"^(\w+): +(\d+) kB", rollup, re.MULTILINE)}
            status = Path(f"/proc/{process.pid}/status").read_text()
            tables = re.search(r"^VmPTE:\s+(\d+)", status, re.MULTILINE)
            row = sums.setdefault(found, {"processes": 0, "pss": 0.0, "uss": 0.0, "rss": 0.0, "pages": 0.0})
            row["processes"] += 1
            row["pss"] += kib["Pss"] / 1024
            row["uss"] += (kib["Private_Clean"] + kib["Private_Dirty"]) / 1024
            row["rss"] += kib["Rss"] / 1024
            row["pages"] += int(tables[1]) / 1024 if tables else 0.0
    return sums


def run(mode: str, ranks: int) -> dict[str, Any]:
    """One run: seconds to its first step, its memory, and seconds from SIGKILL of rank 1 to the first new step."""
    env = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PYTHONPATH=str(PEERS))
    env.pop("RAY_ADDRESS", None)
    with tempfile.TemporaryDirectory() as folder:
        out, storage = f"{folder}/out", f"{folder}/runs"
        started = time.time()
        process = subprocess.Popen(
            command(mode, ranks, out, storage),
            cwd=PEERS,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        children: list[psutil.Process] = []
        try:
            victim = wait(lambda: seen[-1] if len(seen := forwards(out, 1)) >= AT else None, process, 4 * LIMIT_S)
            first = forwards(out, 0)[0][0] - started
            pids = {forwards(out, rank)[-1][1] for rank in range(ranks)}
            taken = memory(psutil.Process(process.pid), pids)
            before, begun = {pid for _, pid in forwards(out, 0)}, time.time()
            os.kill(victim[1], signal.SIGKILL)
            back = recovered("raydist", process, out, f"{storage}", before, [], begun, LIMIT_S)
            children = psutil.Process(process.pid).children(recursive=True)
            return {"first_step": first, "recovery": back["seconds"], "memory": taken}
        finally:
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=30)
            process.kill()
            process.wait()
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()


def main() -> None:
    """Runs, prints the table, writes results/fork_servers.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args()
    rounds: list[dict[str, dict[str, Any]]] = []
    for i in range(options.rounds):
        modes = MODES[i % 3 :] + MODES[: i % 3]
        rounds.append({mode: run(mode, options.ranks) for mode in modes})
        print(f"round {i + 1}: {rounds[-1]}", flush=True)
    medians: dict[str, Any] = {}
    for mode in MODES:
        for name in KINDS:
            rows = [r[mode]["memory"][name] for r in rounds if name in r[mode]["memory"]]
            if rows:
                medians.setdefault(mode, {})[name] = {k: statistics.median(row[k] for row in rows) for k in rows[0]}
                print(mode, name, {k: round(v, 1) for k, v in medians[mode][name].items()})
    pss = {
        mode: statistics.median(sum(row["pss"] for row in r[mode]["memory"].values()) for r in rounds) for mode in MODES
    }
    ratios = {
        mode: {
            "pss": pss[mode] / pss["own"],
            **{
                what: statistics.median(r[mode][what] / r["own"][what] for r in rounds)
                for what in ("first_step", "recovery")
            },
        }
        for mode in MODES
    }
    print("PSS in MiB:", pss, "over own:", ratios)
    print(
        write(
            "fork_servers", {"ranks": options.ranks, "rounds": rounds, "medians": medians, "pss": pss, "ratios": ratios}
        )
    )


if __name__ == "__main__":
    main()
