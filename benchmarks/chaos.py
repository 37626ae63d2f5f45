"""Trains under random faults of all classes for a given time, then checks that nothing was lost, trained twice or left behind.

    python benchmarks/chaos.py [--seconds 300] [--seed 1] [--hosts | --mesh | --elastic]

Two gloo ranks, or with `--mesh` four (pipeline 2 x tensor 2), a small GPT, a checkpoint every ten steps, memory checkpoints
every five; on this machine, or with `--hosts` on a cluster of four hosts in network namespaces: the driver's, and
three of which two have a rank. There, nodes are also killed and drained (and return at once), their /dev/shm is full and the
network of one node is cut for a while, and the head is lost and comes back at another address. The same run without faults comes
first. The kinds of a rank come in turn: all of them, before one comes again.

A killed process of a private Ray, or a lost head, ends the driver with exit code 3; the same command is run again, with the new
address.

Checked: every fault that was asked for has happened; every step has exactly one row, whose samples, loss and norm equal those of
the undisturbed run, bit for bit; the weights of the last checkpoint have the same bytes; no process, namespace, port, or file in
/dev/shm or /tmp is left. Printed: goodput (the time of the steps that counted, divided by the whole time) and each incident. A
killed driver is restarted at once with the same command.

With `--mesh` no bit is flipped: there is one replica, which nothing is compared with.

With `--elastic` the run has four virtual ranks on two or three workers of that cluster, as many as there are nodes, and the
undisturbed one is on one worker. It may run out of memory once: it then computes activations again, and has the same bits.

Not included: faults after which the numbers differ correctly, by a skipped batch (bad_number, loss_spike) or a halved micro-batch
(out_of_memory without virtual ranks, memory_hog). tests/faults has them.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from common import write
from places import Here, Net

from raydist import faults
from raydist.faults import Fault
from raydist.records import Event
from raydist.run.directory import RunDir
from raydist.run.log import read_events, read_steps
from tests.exact import exact, weights

RAYDIST = str(Path(sys.executable).with_name("raydist"))
JOB: dict[str, Any] = {
    "name": "calm",
    "model": {"name": "gpt", "layers": 2, "width": 128, "heads": 4, "context": 128, "dropout": 0.1},
    "data": {"source": "python-stdlib"},
    "train": {"steps": 100, "global_batch": 16, "micro_batch": 4, "seed": 5, "check_replicas": 5},
    "checkpoint": {"every": 10, "keep": 3},
    "eval": {"every": None},
    "recovery": {"max_failures": -1, "backoff_s": 0.0, "step_timeout": 3.0, "data_timeout": 2.0, "snapshot_every": 5},
    "cluster": {"workers": 2, "cpus_per_worker": 1},
}
MESH = {"parallel": {"tensor": 2, "pipeline": 2}, "cluster": {"workers": 4, "cpus_per_worker": 0.5}}
"""Sections of the job with `--mesh`."""
ELASTIC = {"train": {**JOB["train"], "virtual_ranks": 4}, "cluster": {"workers": [2, 3], "cpus_per_worker": 1}}
"""Sections of the job with `--elastic`."""
APART = 25
"""Steps from one fault to the next, with two checkpoints between them, so that the run always counts as making progress."""
COST_S = 7.0
"""Approximate cost of a fault; determines the number of faults."""

GONE_S = 10.0
"""How long after its end the run may still have processes."""

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
    lambda rank, step: faults.StaleStorage(rank=rank, step=step, seconds=0.5),
    lambda rank, step: faults.NoInodes(rank=rank, step=step, operations=1),
    lambda rank, step: faults.CutUpload(rank=rank, step=step, operations=1),
    lambda rank, step: faults.BusyStorage(rank=rank, step=step, seconds=0.5),
    lambda rank, step: faults.UnmountedStorage(rank=rank, step=step, seconds=0.5),
    lambda rank, step: faults.HangingStorage(rank=rank, step=step, seconds=5.0),
    lambda rank, step: faults.NoDescriptors(rank=rank, step=step, seconds=0.5),
    lambda rank, step: faults.NoProcesses(rank=rank, step=step, seconds=0.5),
    lambda rank, step: faults.NoProcesses(rank=rank, step=step // 10 * 10, phase="save", seconds=0.5),
    lambda rank, step: faults.SlowNetwork(rank=rank, step=step, seconds=1.0, bytes_per_s=1 << 20),
    lambda rank, step: faults.SlowNetwork(rank=rank, step=step, seconds=600.0, bytes_per_s=1 << 12),
    lambda rank, step: faults.OneWayCut(rank=rank, step=step, seconds=1.0),
    lambda rank, step: faults.OneWayCut(rank=rank, step=step, seconds=600.0),
    lambda rank, step: faults.OneWayCut(rank=rank, step=step, seconds=2.0, share=0.1),
    lambda rank, step: faults.SlowDisk(rank=rank, step=step, seconds=3.0, bytes_per_s=1 << 20),
    lambda rank, step: faults.DamageCopy(rank=rank, step=step),
    lambda rank, step: faults.DamageMessage(rank=rank, step=step),
    lambda rank, step: faults.ClockJump(rank=rank, step=step, seconds=3600.0 if step % 2 else -3600.0),
    lambda rank, step: faults.ClockJump(rank=rank, step=step, seconds=3600.0, process="agent"),
    lambda rank, step: faults.SuspendProcess(rank=rank, step=step, process="agent", seconds=5.0),
    lambda rank, step: faults.SuspendProcess(rank=rank, step=step, process="agent", seconds=20.0),
    lambda rank, step: faults.KillAgent(rank=rank, step=step),
    lambda rank, step: faults.KillMonitor(step=step),
    lambda rank, step: faults.KillDriver(step=step),
    lambda rank, step: faults.FlipBit(rank=rank, step=step),
]
OF_A_PRIVATE_RAY: list[Callable[[int, int], Fault]] = [
    lambda rank, step: faults.DriverClockJump(step=step, seconds=3600.0 if step % 2 else -3600.0),
    *(
        lambda rank, step, process=process: faults.SuspendProcess(rank=rank, step=step, process=process, seconds=5.0)
        for process in ("monitor", "coordinator", "raylet", "gcs")
    ),
    *(
        lambda rank, step, to=to, by=by: faults.KillProcess(rank=rank, step=step, process=to, lack_of_memory=by)
        for by, names in ((False, "coordinator raylet gcs"), (True, "agent monitor coordinator raylet gcs"))
        for to in names.split()
    ),
]
OF_VIRTUAL_RANKS: list[Callable[[int, int], Fault]] = [lambda rank, step: faults.OutOfMemory(rank=rank, step=step)]
OF_NODES: list[Callable[[int, int], Fault]] = [
    lambda rank, step: faults.KillNode(rank=rank, step=step),
    lambda rank, step: faults.Drain(rank=rank, step=step),
    lambda rank, step: faults.FullSharedMemory(rank=rank, step=step, seconds=3.0),
]
FROM_OUTSIDE = "cut", "move"
"""What is no fault of a file: the network of a node is cut, or the head is lost and comes back at another address."""
OF_RAY = re.compile(r"Ray's (?:GCS|raylet|coordinator|head)\b|the cluster no longer answers")
"""In the cause of a run that has ended with exit code 3 because a process of Ray was killed: the same command resumes it."""


def train(place: Here | Net, folder: Path, name: str, steps: int, *options: str) -> float:
    """Trains to the end, restarting the command if the driver or a process of its Ray was killed; returns seconds."""
    command = [RAYDIST, "train", "job.yaml", "--name", name, "--storage", str(folder)]
    begun = time.monotonic()
    while True:
        where = ["--address", place.address]
        code, told = place.run([*command, *where, "--set", f"train.steps={steps}", *options], folder)
        if code == 0:
            return time.monotonic() - begun
        place.repair()
        ended = read_events(RunDir(folder / name))[-1].data.get("cause", "") if code == 3 else ""
        if code not in (-9, 137) and not OF_RAY.search(ended or ""):
            sys.exit(f"{name} ended with {code}:\n{told[-3000:]}")


def differences(one: RunDir, other: RunDir) -> list[str]:
    """The steps whose rows differ, are absent or are there more than once, at most ten."""
    found: list[str] = []
    rows = [exact(read_steps(run).to_pylist()) for run in (one, other)]
    for step in sorted({row[0] for each in rows for row in each}):
        mine, theirs = ([row for row in each if row[0] == step] for each in rows)
        if mine != theirs:
            found.append(f"step {step}: {mine} instead of {theirs}")
    return found[:10]


def newest(run: RunDir) -> dict[str, bytes]:
    """The tensors of the newest checkpoint."""
    return weights(run, run.committed()[-1])


def missing(wanted: Sequence[Fault], events: Sequence[Event]) -> list[str]:
    """The faults that were asked for and have no event of their own: of that kind, on that rank, in that step."""
    happened = [
        tuple(event.data[key] for key in ("fault", "rank", "step")) for event in events if event.kind == "fault"
    ]
    left: list[str] = []
    for fault in wanted:
        if (one := (fault.fault, fault.rank, fault.step)) in happened:
            happened.remove(one)
        else:
            left.append(f"{fault.fault} on rank {fault.rank} in step {fault.step}")
    return left


def reasons(events: Sequence[Event]) -> list[str]:
    """What the run says of the faults that have not happened."""
    told = [event.data["text"] for event in events if event.kind == "note"]
    return [text for text in told if text.startswith("the fault ")]


def traces() -> set[str]:
    """What a run may leave on this host besides processes: names in /dev/shm and /tmp, and ports that raydist's processes hold."""
    names = {str(p) for folder in ("/dev/shm", tempfile.gettempdir()) for p in Path(folder).glob("raydist-*")}
    ours = {p.pid for p in psutil.Process().children(recursive=True)}
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid in ours]
    return names | {f"port {c.laddr.port}" for c in listening}


def incidents(events: list[Event]) -> list[dict[str, Any]]:
    """Each fault and failure in order; if it ended an attempt or a driver, with the seconds to the next first step."""
    found: list[dict[str, Any]] = []
    for event in events:
        if event.kind == "fault":
            keys = ("fault", "rank", "step")
            found.append({**{key: event.data[key] for key in keys}, "seconds": None, "repeated": None, "cause": ""})
        elif event.kind == "failure":
            # Not caused by a fault that was logged.
            if not found or found[-1]["cause"] or found[-1]["seconds"] is not None:
                rank = "-" if event.data["rank"] is None else event.data["rank"]
                found.append({"fault": "-", "rank": rank, "step": "-", "seconds": None, "repeated": None})
            found[-1]["cause"] = event.data["cause"].replace(f"{Path(__file__).parents[1]}/", "")
        elif event.kind == "first_step" and event.data["attempt"] > 1 and found and found[-1]["seconds"] is None:
            found[-1] |= {"seconds": event.data["seconds"], "repeated": event.data["repeated_steps"]}
    return found


def main() -> None:
    """Runs both, compares them, prints and writes the results. Exit code 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=1)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--hosts", action="store_true", help="on four hosts in network namespaces; needs root")
    which.add_argument("--mesh", action="store_true", help="pipeline 2 x tensor 2, on this machine")
    which.add_argument("--elastic", action="store_true", help="as --hosts, with virtual ranks on two or three workers")
    options = parser.parse_args()
    of_hosts = options.hosts or options.elastic
    # Orphaned processes become children of this one, so that all are counted.
    assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.pop("RAY_ADDRESS", None)
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        job = {**JOB, **(MESH if options.mesh else ELASTIC if options.elastic else {})}
        (folder / "job.yaml").write_text(yaml.safe_dump(job))
        workers = int(job["cluster"]["workers"]) if not options.elastic else min(job["cluster"]["workers"])
        here = [kind for kind in KINDS if not options.mesh or kind(0, 10).fault != "flip_bit"]
        here += [] if of_hosts else OF_A_PRIVATE_RAY
        here += OF_VIRTUAL_RANKS if options.elastic else []
        place = Net() if of_hosts else Here()
        train(place, folder, "warm", 60)
        pace = sorted(read_steps(RunDir(folder / "warm"))["seconds"].to_pylist())[30]
        count = max(4 if of_hosts else 3, int(options.seconds / (COST_S + APART * pace)))
        steps = APART * (count + 1)
        rng = random.Random(options.seed)
        # On hosts every second fault is a node fault: killed, drained, or its network is cut, every second time in one direction.
        chosen: list[Fault] = []
        turn: list[Any] = []
        outside: dict[str, list[int]] = {what: [] for what in FROM_OUTSIDE}
        for i in range(count):
            of_node = of_hosts and i % 2 == 0
            if not of_node and not turn:  # all kinds, then all again in another order
                turn = rng.sample(here, len(here))
            kind = rng.choice([*OF_NODES, *FROM_OUTSIDE]) if of_node else turn.pop()
            rank, step = rng.randrange(workers), APART * (i + 1) + rng.randrange(10)
            if kind in FROM_OUTSIDE:
                outside[kind].append(step)
            else:
                chosen.append(kind(rank, step))
            here = [other for other in here if other is not kind or kind not in OF_VIRTUAL_RANKS]
        asked = [fault.model_dump(mode="json", exclude_none=True) for fault in chosen]
        (folder / "faults.yaml").write_text(yaml.safe_dump(asked))
        before = traces()
        train(place, folder, "calm", steps, *(["--set", "cluster.workers=1"] if options.elastic else []))
        calm, chaos = RunDir(folder / "calm"), RunDir(folder / "chaos")
        if isinstance(place, Net):
            place.cuts, place.moves, place.watched = outside["cut"], outside["move"], chaos
        wall = train(place, folder, "chaos", steps, "--faults", "faults.yaml")
        place.close()
        left = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
        _, alive = psutil.wait_procs(left, timeout=GONE_S)
        running = ", ".join(map(str, alive))
        events = read_events(chaos)
        absent = missing(chosen, events)
        happened = len(chosen) - len(absent) + (len(place.done) if isinstance(place, Net) else 0)
        unlike = differences(chaos, calm)
        checks = {
            f"every fault has happened{': not ' + ', '.join(absent) if absent else ''}": 0 < happened == count,
            "every step once, samples and losses as undisturbed": not unlike,
            "weights and optimizer as undisturbed": newest(chaos) == newest(calm),
            f"no process left, and no namespace{': ' + running if running else ''}": not alive,
            "no port, and no file in /dev/shm or /tmp left": traces() <= before,
        }
        useful = sum(read_steps(chaos)["seconds"].to_pylist())
        table = incidents(events)
        if options.elastic:
            sizes = read_steps(chaos)["world_size"].to_pylist()
            checks["the number of workers has changed"] = len(set(sizes)) > 1
    print(f"{'fault':18s} {'rank':>4s} {'step':>5s} {'first step after':>16s} {'repeated':>8s}  cause")
    for row in table + (place.done if isinstance(place, Net) else []):
        row = {"seconds": None, "repeated": None, "cause": ""} | row
        seconds = "-" if row["seconds"] is None else f"{row['seconds']:.1f} s"
        repeated = "-" if row["repeated"] is None else row["repeated"]
        print(f"{row['fault']:18s} {row['rank']:4} {row['step']:5} {seconds:>16s} {repeated:>8}  {row['cause'][:90]}")
    print(f"\n{happened} of {count} faults in {wall:.0f} s, {steps} steps; goodput {useful / wall:.2f}")
    for check, holds in checks.items():
        print(f"{'ok' if holds else 'FAILED':7s}{check}")
    print(*unlike, *reasons(events), sep="\n")
    asked_for = {"seed": options.seed, "hosts": of_hosts, "mesh": job.get("parallel", {})}
    result = {**asked_for, "steps": steps, "wall_s": wall, "goodput": useful / wall, "checks": checks}
    name = next((f"chaos_{kind}" for kind in ("hosts", "mesh", "elastic") if getattr(options, kind)), "chaos")
    print(write(name, {**result, "not_injected": reasons(events), "incidents": json.loads(json.dumps(table))}))
    sys.exit(0 if all(checks.values()) else 1)


if __name__ == "__main__":
    main()
