"""Scores raydist.diagnosis on real gloo ranks with the faults of `raydist faults`, and on healthy ones.

    python benchmarks/doctor_ranks.py [--each 2] [--only NAME] [--world 2]

Each scenario trains a small GPT with the loop of raydist on ranks of this host, with telemetry, a node monitor and the rules, as
in a run, but without Ray. A fault begins at a step and on a rank that a seed draws. Of a fault the first finding counts, within
WAIT_S; healthy ranks train for HEALTHY_S. The other programs of this host are part of it: `load` is printed with each result.
`seconds`: from the fault's note to the finding; one that lasts over parts of 3 s is found when enough of them are over.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import socket
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from common import write

from raydist import faults
from raydist.diagnosis import Diagnosis
from raydist.observe.node_monitor import NodeMonitor
from raydist.records import Event, Finding
from raydist.run.directory import RunDir
from raydist.spec import JobSpec

WAIT_S, HEALTHY_S = 120.0, 90.0
EVERY_S = 2.0


@dataclass(frozen=True)
class Scenario:
    """`rules`: the right answers, () if it is healthy; `fault`: fields of the fault; `hook`: whether that rank's hook sleeps;
    `spec`: sections of the job; `culprit`: what is to be named."""

    name: str
    rules: tuple[str, ...]
    fault: dict[str, Any] | None = None
    hook: bool = False
    spec: dict[str, Any] = field(default_factory=dict)
    culprit: str = "rank"


LONG = 10**6
EXPERTS = {
    "model": {
        "name": "qwen_moe", "layers": 2, "width": 64, "heads": 4, "context": 64,
        "options": {"num_experts": 4, "balance_loss": 0.1},
    },
    "parallel": {"expert": 2},
}  # fmt: skip
SCENARIOS = [
    Scenario("SIGSTOP bursts", ("process_stopped",), {"fault": "pause", "seconds": 0.5, "gap": 0.7, "stops": 60}),
    Scenario("one SIGSTOP of 5 s", ("process_stopped",), {"fault": "pause", "seconds": 5, "stops": 1}),
    Scenario("CPU quota 0.03", ("cpu_throttled",), {"fault": "cpu_quota", "seconds": 150, "cpus": 0.03}),
    Scenario("CPU quota 0.15", ("cpu_throttled",), {"fault": "cpu_quota", "seconds": 150, "cpus": 0.15}),
    Scenario("CPU hog", ("cpu_stolen",), {"fault": "cpu_hog", "seconds": 90, "processes": 4}),
    Scenario("garbage collector", ("gc_pauses",), {"fault": "garbage", "objects": 3_000_000, "steps": LONG}),
    Scenario("own code waits", ("own_code",), {"fault": "slow_rank", "seconds": 0.5, "steps": LONG}),
    Scenario("slow loader", ("slow_loader",), {"fault": "slow_data", "seconds": 0.7, "steps": LONG}),
    Scenario("slow hook", ("slow_hook",), hook=True),
    Scenario("poisoned batch", ("bad_batch",), {"fault": "loss_spike"}, culprit="step"),
    Scenario(
        "not finite", ("bad_batch",), {"fault": "bad_number"}, spec={"recovery": {"on_nan": "skip"}}, culprit="step"
    ),
    Scenario(
        "learning rate too high",
        ("lr_too_high",),
        spec={"optim": {"lr": 0.5, "schedule": {"warmup": 2000}}},
        culprit="optim.lr",
    ),
    Scenario(
        "expert imbalance",
        ("expert_imbalance",),
        {"fault": "expert_imbalance", "rank": None, "experts": 2, "tokens": 0.7, "steps": LONG},
        spec=EXPERTS,
        culprit="expert_rank",
    ),
    Scenario("healthy", ()),
    Scenario("healthy experts", (), spec=EXPERTS),
    Scenario("healthy zero2 bf16", (), spec={"precision": "bf16", "parallel": {"strategy": "zero2"}}),
]


class SlowHook:
    """Sleeps in each step of rank 0, from the step in its options on."""

    def __init__(self, facts: Any) -> None:
        self.first = facts.options["first"]

    def on_step(self, record: Any) -> None:
        """Half a second."""
        if record.step >= self.first:
            time.sleep(0.5)


def train(number: int, world: int, port: int, spec: Any, folder: str, asked: Any, pipe: Any) -> None:
    """One rank, until it is killed."""
    os.environ.update(RANK=str(number), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(LOCAL_RANK=str(number), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    from raydist.worker import distributed, loop
    from raydist.worker.attempt import Job, MonitorChannel

    rank = distributed.start(gpus=0, threads=1, timeout_s=120, node_ip="127.0.0.1")
    job = Job(JobSpec.model_validate(spec), RunDir(f"{folder}/run"), f"{folder}/tokens", faults=asked)

    def push(steps: Any, events: Any) -> None:
        pipe.send((steps, events))

    loop.train(job, rank, MonitorChannel(push, lambda: None) if rank.first else None)


def play(scenario: Scenario, seed: int, world: int, folder: Path) -> dict[str, Any]:
    """Trains, and returns what was told first, the culprit, the time, and what else was told."""
    rng = np.random.default_rng([seed, *scenario.name.encode()])
    rank = 0 if scenario.hook else int(rng.integers(world))
    step = int(np.exp(rng.uniform(np.log(20), np.log(2000))))  # before and after the run has a history
    spec: dict[str, Any] = {
        "data": {"path": str(folder / "tokens")},
        "model": {"name": "gpt", "layers": 2, "width": 64, "heads": 4, "context": 64},
        "train": {"steps": LONG, "global_batch": 8 * world, "micro_batch": 8},
        "checkpoint": {"every": None},
        "eval": {"every": None},
        "cluster": {"workers": world},
        **scenario.spec,
    }
    if scenario.hook:
        spec["hooks"] = [{"name": "doctor_ranks:SlowHook", "options": {"first": step}}]
    asked = [{"rank": rank, **scenario.fault, "step": step}] if scenario.fault else []
    run = RunDir(folder / "run")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=train, args=(r, world, port, spec, str(folder), asked, theirs)) for r in range(world)
    ]
    for process in ranks:
        process.start()
    rows: list[Any] = []
    monitor = NodeMonitor(
        run.uri, "127.0.0.1", SimpleNamespace(observe=SimpleNamespace(remote=rows.extend)), 1.0, str(folder)
    )
    monitor._send = lambda wait_s=0.0: (
        rows.extend(r for read in monitor._unsent for r in read),
        monitor._unsent.clear(),
    )  # type: ignore[assignment, method-assign]
    diagnosis = Diagnosis(spec=spec)
    begun: float | None = None
    told: list[tuple[float, Finding]] = []
    trained = 0
    first = time.time()
    deadline = first + 300
    try:
        while time.time() < deadline:
            time.sleep(EVERY_S)
            steps, events = [], []
            while ours.poll():
                made, said = ours.recv()
                steps += made
                events += [
                    Event(e["kind"], e["at"], {k: v for k, v in e.items() if k not in ("kind", "at", "v")})
                    for e in said
                ]
            trained = steps[-1]["step"] if steps else trained
            now, new = time.time(), rows[:]
            del rows[: len(new)]
            if begun is None and trained >= (step if scenario.rules else 1):
                notes = faults.read_notes(run)
                begun = next((note["at"] for note in notes.values()), now) if scenario.fault else now
                deadline = begun + (WAIT_S if scenario.rules else HEALTHY_S)
            told += [(now, one) for one in diagnosis.observe(new, steps, events) if one.state != "over"]
            if scenario.rules and begun is not None and told and now - told[0][0] > 8:
                break
            if not all(process.is_alive() for process in ranks):
                raise RuntimeError(f"{scenario.name}: a rank has ended")
    finally:
        for process in ranks:
            process.kill()
            process.join()
        monitor.close()
    assert not diagnosis.problems, diagnosis.problems
    at, one = told[0] if told else (None, None)
    named = one is not None and {
        "rank": one.rank == rank, "step": one.culprit.get("step") == step, "expert_rank": one.culprit.get("expert_rank") == 0
    }.get(scenario.culprit, one.culprit.get("setting") == scenario.culprit)  # fmt: skip
    return {
        "scenario": scenario.name, "seed": seed, "told": one.rule if one else "nothing", "steps": trained,
        "culprit": named, "cause": one is not None and one.rule in scenario.rules,
        "seconds": round(at - begun, 1) if at and begun else None, "load": round(os.getloadavg()[0], 1),
        "what": one.what if one else "", "others": [other.rule for _, other in told[1:]],
    }  # fmt: skip


def main() -> None:
    """Runs, prints, writes results/doctor_ranks.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--each", type=int, default=2)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--only", default="", help="scenarios whose name contains this; writes nothing")
    options = parser.parse_args()
    found = []
    for scenario in SCENARIOS:
        for seed in range(options.each if options.only in scenario.name else 0):
            with tempfile.TemporaryDirectory(prefix="raydist-doctor-") as folder:
                from raydist.data.prepare import prepare

                Path(folder, "text.txt").write_text("so it goes. " * 20_000)
                prepare([f"{folder}/text.txt"], f"{folder}/tokens", eval_fraction=0.1)
                found.append(play(scenario, seed, options.world, Path(folder)))
            print(found[-1], flush=True)
    faulty = [one for one in found if not one["scenario"].startswith("healthy")]
    result = {
        "world": options.world,
        "scenarios": len(found),
        "culprit": sum(one["culprit"] for one in faulty) / max(len(faulty), 1),
        "cause": sum(one["cause"] for one in faulty) / max(len(faulty), 1),
        "healthy": len(found) - len(faulty),
        "false": sum(one["told"] != "nothing" for one in found if one["scenario"].startswith("healthy")),
        "matrix": {s.name: dict(Counter(o["told"] for o in found if o["scenario"] == s.name)) for s in SCENARIOS},
        "seconds": sorted(one["seconds"] for one in faulty if one["seconds"] is not None and one["cause"]),
        "loads": [one["load"] for one in found],
    }
    print(result)
    if not options.only:
        write("doctor_ranks", result)


if __name__ == "__main__":
    main()
