"""Recovery from a fault: seconds to the first new step, and steps lost, of raydist, plain Ray Train and torchrun --max-restarts.

    python benchmarks/recovery.py [--rounds 3] [--faults kill stop] [--meshes]

Two gloo ranks of one thread train the same model; a checkpoint every 20 steps; rank 1 gets SIGKILL or SIGSTOP in its 30th step.
The peers run one after another, in a rotated order each round. The time is from the signal to the end of rank 0's first step in
its new process, measured in the model's forward, the same for all; `lost` are the steps that are trained again. A peer that has
not recovered after 60 s, or that gives up, counts as 60.

With `--meshes` raydist alone: four ranks of ddp, tensor 2 x pipeline 2, dp 2 x tensor 2 and dp 2 x pipeline 2, of a GPT with
checkpoints every 10 steps, in which rank 1 gets a fault in step 15 of 30. The time is from the fault to the end of the first new
step, by the events of the run; the ratio over ddp is of the same round. A step of a mesh has another duration than one of ddp,
whether it is the first or a later one: `restart` is that time without a usual step, the median of the new attempt.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from common import write

PEERS = Path(__file__).parent / "peers"
BIN = Path(sys.executable).parent
NAMES = ["raydist", "ray train", "torchrun"]
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
EVERY, AT, STEPS = 20, 30, 60
LIMIT_S = 60.0


def command(peer: str, out: str, storage: str) -> list[str]:
    """The command of one run."""
    if peer == "raydist":
        sets = {"model.options": f"{{out: {out}}}", "train.steps": STEPS, "checkpoint.every": EVERY}
        options = [part for name, value in sets.items() for part in ("--set", f"{name}={value}")]
        return [
            str(BIN / "raydist"),
            "train",
            "job.yaml",
            "--fresh",
            "--storage",
            storage,
            "--address",
            "local",
            *options,
        ]
    if peer == "ray train":
        return [sys.executable, "recovering.py", "ray", out, str(STEPS), str(EVERY)]
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    torchrun = [str(BIN / "torchrun"), "--nproc-per-node", "2", "--max-restarts", "3", "--master-port", str(port)]
    return [*torchrun, "recovering.py", "torchrun", out, str(STEPS), str(EVERY)]


def forwards(out: str, rank: int) -> list[tuple[float, int]]:
    """(Unix time, pid) of each forward of a rank so far."""
    with contextlib.suppress(FileNotFoundError):
        lines = Path(f"{out}.{rank}.forwards").read_text().splitlines()
        return [(float(at), int(pid)) for at, pid in (line.split() for line in lines)]
    return []


def wait(ready: Any, process: subprocess.Popen[str], limit_s: float, may_end: bool = False) -> Any:
    """Waits for a result of `ready()` that is not None. None after `limit_s`, or if the process `may_end` and ends."""
    deadline = time.monotonic() + limit_s
    while (found := ready()) is None and time.monotonic() < deadline:
        if process.poll() is not None:
            if may_end:
                return None
            sys.exit(f"the process ended too early: {(process.communicate()[1] or '')[-3000:]}")
        time.sleep(0.02)
    return found


def steps_done(peer: str, out: str) -> list[int]:
    """Step numbers in the order in which rank 0 trained them. The peers' loop logs them; raydist's forwards have no number."""
    with contextlib.suppress(FileNotFoundError):
        return [int(line) for line in Path(f"{out}.0.steps").read_text().split()]
    return []


def recovered(
    peer: str,
    process: subprocess.Popen[str],
    out: str,
    storage: str,
    before: set[int],
    done: list[int],
    begun: float,
    limit_s: float,
) -> dict[str, float]:
    """Waits for the first new step after a fault at `begun`: seconds until then, and steps lost. `before`: the processes of rank 0
    until then; `done`: its steps.
    """

    def back() -> float | None:
        new = [at for at, pid in forwards(out, 0) if at > begun and pid not in before]
        return new[1] if len(new) > 1 else None

    first = wait(back, process, limit_s, may_end=peer != "raydist")
    if peer == "raydist":
        lost = repeated(storage)
    else:
        again = steps_done(peer, out)[len(done) :]
        lost = max(done[-1] - min(again, default=0) + 1, 0) if first else done[-1]
    return {"seconds": (first or begun + limit_s) - begun, "lost": lost}


def run(peer: str, fault: str, storage: str) -> dict[str, float]:
    """One run with one fault: seconds to the first new step, and steps lost."""
    env = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PYTHONPATH=str(PEERS))
    env.pop("RAY_ADDRESS", None)
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/out"
        process = subprocess.Popen(
            command(peer, out, storage),
            cwd=PEERS,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            victim = wait(lambda: seen[-1] if len(seen := forwards(out, 1)) >= AT else None, process, LIMIT_S)
            before, done = {pid for _, pid in forwards(out, 0)}, steps_done(peer, out)
            begun = time.time()
            os.kill(victim[1], SIGNALS[fault])
            return recovered(peer, process, out, storage, before, done, begun, LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim[1], signal.SIGCONT)
            children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=20)
            process.kill()
            process.wait()
            for child in children:  # torchrun's ranks have their own sessions, and outlive it
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()


def repeated(storage: str) -> int:
    """raydist's own report of the last incident."""
    from raydist.run.directory import RunDir
    from raydist.run.log import read_events

    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        told = [
            e.data for e in read_events(RunDir(f"{storage}/peers")) if e.kind == "first_step" and e.data["attempt"] > 1
        ]
        if told:
            return int(told[-1]["repeated_steps"])
        time.sleep(0.2)
    sys.exit("raydist reported no first step after the fault")


MESHES: dict[str, dict[str, int]] = {
    "ddp": {},
    "tensor 2 x pipeline 2": {"tensor": 2, "pipeline": 2},
    "dp 2 x tensor 2": {"tensor": 2},
    "dp 2 x pipeline 2": {"pipeline": 2},
}
MESH_JOB = {
    "name": "mesh",
    "model": {"layers": 4, "width": 128, "heads": 4, "context": 128},
    "data": {"source": "python-stdlib"},
    "train": {"steps": 30, "global_batch": 16, "micro_batch": 2},
    "checkpoint": {"every": 10},
    "eval": {"every": None},
    "cluster": {"workers": 4, "cpus_per_worker": 0.5},
}


def of_mesh(mesh: str, fault: str, storage: str) -> dict[str, float]:
    """One run on a mesh with one fault: seconds to the first new step, in all and by stage, and steps lost."""
    from raydist.run.directory import RunDir
    from raydist.run.log import read_events, read_steps

    env = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    env.pop("RAY_ADDRESS", None)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job.yaml").write_text(yaml.safe_dump({**MESH_JOB, "parallel": MESHES[mesh]}))
        kind = {"kill": "kill", "stop": "suspend"}[fault]
        Path(folder, "faults.yaml").write_text(yaml.safe_dump([{"fault": kind, "rank": 1, "step": 15}]))
        asked = [str(BIN / "raydist"), "train", "job.yaml", "--fresh", "--storage", storage, "--address", "local"]
        done = subprocess.run([*asked, "--faults", "faults.yaml"], cwd=folder, env=env, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{mesh}: {done.stderr[-3000:]}")
    events = read_events(RunDir(f"{storage}/mesh"))
    begun = next(e.at for e in events if e.kind == "fault")
    _, back = (e for e in events if e.kind == "first_step")  # --fresh goes on counting attempts
    seconds = back.at - begun
    rows = read_steps(RunDir(f"{storage}/mesh"), columns=["attempt", "seconds"]).to_pylist()
    usual = statistics.median(row["seconds"] for row in rows if row["attempt"] == back.data["attempt"])
    return {"seconds": seconds, "restart": seconds - usual, "lost": back.data["repeated_steps"], **back.data["stages"]}


def meshes(rounds: int, faults: list[str]) -> None:
    """Runs them in a rotated order each round, prints the table, writes results/recovery_mesh.json."""
    names, found = [*MESHES], list[dict[str, dict[str, dict[str, float]]]]()
    with tempfile.TemporaryDirectory() as storage:
        for i in range(rounds):
            turn = names[i % len(names) :] + names[: i % len(names)]
            found.append({fault: {mesh: of_mesh(mesh, fault, storage) for mesh in turn} for fault in faults})
            print(f"round {i + 1}: {found[-1]}", flush=True)
    table: dict[str, dict[str, dict[str, float]]] = {}
    stages = [key for key in found[0][faults[0]]["ddp"] if key not in ("seconds", "restart", "lost")]
    columns = f"{'seconds':>8s} {'/ddp':>6s} {'restart':>8s} {'/ddp':>6s} {'lost':>5s}"
    print(f"\n{'fault':6s} {'mesh':22s} {columns}", *(f"{stage:>10s}" for stage in stages))
    for fault in faults:
        for mesh in names:
            each = {key: statistics.median(r[fault][mesh][key] for r in found) for key in found[0][fault][mesh]}
            ratio, restarts = (
                statistics.median(r[fault][mesh][key] / r[fault]["ddp"][key] for r in found)
                for key in ("seconds", "restart")
            )
            table.setdefault(fault, {})[mesh] = {**each, "over_ddp": ratio, "restart_over_ddp": restarts}
            more = (f"{each[stage]:10.2f}" for stage in stages)
            both = f"{each['seconds']:8.2f} {ratio:6.3f} {each['restart']:8.2f} {restarts:6.3f}"
            print(f"{fault:6s} {mesh:22s} {both} {each['lost']:5.0f}", *more)
    print(write("recovery_mesh", {"rounds": found, "medians": table}))


def main() -> None:
    """Runs, prints the table, writes results/recovery.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--faults", nargs="+", choices=list(SIGNALS), default=list(SIGNALS))
    parser.add_argument("--meshes", action="store_true", help="meshes of four ranks beside ddp")
    options = parser.parse_args()
    if options.meshes:
        meshes(options.rounds, options.faults)
        return
    rounds: list[dict[str, dict[str, dict[str, float]]]] = []
    with tempfile.TemporaryDirectory() as storage:
        warm = [*command("raydist", f"{storage}/warm", storage), "--until", "1"]
        subprocess.run(warm, cwd=PEERS, check=True, stdout=subprocess.DEVNULL)  # prepares the corpus once
        for i in range(options.rounds):
            names = NAMES[i % 3 :] + NAMES[: i % 3]
            rounds.append({fault: {peer: run(peer, fault, storage) for peer in names} for fault in options.faults})
            print(f"round {i + 1}: {rounds[-1]}", flush=True)
    table: dict[str, dict[str, dict[str, float]]] = {}
    print(f"\n{'fault':6s} {'peer':10s} {'seconds':>8s} {'/ray train':>10s} {'lost':>5s}")
    for fault in options.faults:
        for peer in NAMES:
            seconds = statistics.median(r[fault][peer]["seconds"] for r in rounds)
            ratio = statistics.median(r[fault][peer]["seconds"] / r[fault]["ray train"]["seconds"] for r in rounds)
            lost = statistics.median(r[fault][peer]["lost"] for r in rounds)
            table.setdefault(fault, {})[peer] = {"seconds": seconds, "over_ray_train": ratio, "lost": lost}
            print(f"{fault:6s} {peer:10s} {seconds:8.2f} {ratio:10.3f} {lost:5.0f}")
    print(write("recovery", {"rounds": rounds, "medians": table}))


if __name__ == "__main__":
    main()
