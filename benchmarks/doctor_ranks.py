"""Scores raydist.diagnosis on real gloo ranks with the faults of `raydist faults`, and on healthy ones.

    python benchmarks/doctor_ranks.py [--each 2] [--first 0] [--only NAME] [--world 2]

Each scenario trains a small GPT with the loop of raydist on ranks of this host, with telemetry, a node monitor and the rules, as
in a run, but without Ray. Hardware that is not here is a fault `reading`: telemetry as of it, beside a fault that costs the time.
A fault begins at a step and on a rank that a seed draws. Of a fault the first finding counts, within
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
from raydist.diagnosis import Diagnosis, sizes
from raydist.observe.node_monitor import NodeMonitor
from raydist.records import Event, Finding
from raydist.run.directory import RunDir
from raydist.spec import JobSpec

WAIT_S, HEALTHY_S = 120.0, 90.0
EVERY_S = 2.0


@dataclass(frozen=True)
class Scenario:
    """`rules`: the right answers, () if it is healthy; `faults`: of one step, on the drawn rank, or `on` all ranks or the
    others; `hook`: whether that rank's hook sleeps; `spec`: sections of the job; `culprit`: what is to be named;
    `world`: least number of ranks; `nodes`: whether each rank has a node of its own."""

    name: str
    rules: tuple[str, ...]
    faults: tuple[dict[str, Any], ...] = ()
    hook: bool = False
    spec: dict[str, Any] = field(default_factory=dict)
    culprit: str = "rank"
    world: int = 0
    nodes: bool = False


LONG = 10**6
EXPERTS = {
    "model": {
        "name": "qwen_moe", "layers": 2, "width": 64, "heads": 4, "context": 64,
        "options": {"num_experts": 4, "balance_loss": 0.1},
    },
    "parallel": {"expert": 2},
}  # fmt: skip


def reading(column: str, value: float | str, on: str = "it") -> dict[str, Any]:
    """Telemetry as of hardware that is not here."""
    return {"fault": "reading", "column": column, "value": value, "seconds": 150, "on": on}


SLOW = {"fault": "slow_rank", "seconds": 0.5, "steps": LONG}
NETWORK = {"fault": "slow_network", "seconds": 150, "bytes_per_s": 1 << 20, "on": "all"}
LAYER = "blocks.1.mlp.down.weight"
GRADIENT = {"fault": "scale_gradient", "parameter": LAYER, "steps": LONG, "on": "all"}
OUTPUT = {"fault": "scale_activations", "layer": LAYER.removesuffix(".weight"), "steps": LONG, "on": "all"}
SCENARIOS = [
    Scenario("SIGSTOP bursts", ("process_stopped",), ({"fault": "pause", "seconds": 0.5, "gap": 0.7, "stops": 60},)),
    Scenario("one SIGSTOP of 5 s", ("process_stopped",), ({"fault": "pause", "seconds": 5, "stops": 1},)),
    Scenario("CPU quota 0.03", ("cpu_throttled",), ({"fault": "cpu_quota", "seconds": 150, "cpus": 0.03},)),
    Scenario("CPU quota 0.15", ("cpu_throttled",), ({"fault": "cpu_quota", "seconds": 150, "cpus": 0.15},)),
    Scenario("CPU hog", ("cpu_stolen",), ({"fault": "cpu_hog", "seconds": 90, "processes": 4},)),
    Scenario("garbage collector", ("gc_pauses",), ({"fault": "garbage", "objects": 3_000_000, "steps": LONG},)),
    Scenario("own code waits", ("own_code",), (SLOW,)),
    Scenario("slow loader", ("slow_loader",), ({"fault": "slow_data", "seconds": 0.7, "steps": LONG},)),
    Scenario("slow hook", ("slow_hook",), hook=True),
    Scenario("swap", ("swapping",), (SLOW, reading("major_faults_count", 900.0))),
    Scenario(
        "GPU too hot",
        ("gpu_throttled",),
        (
            SLOW,
            reading("gpu_sm_clock_hz", 0.6e9),
            reading("gpu_throttle", "thermal"),
            reading("gpu_temperature_celsius", 91.0),
            reading("gpu_sm_clock_hz", 1.7e9, "others"),
        ),
    ),
    Scenario(
        "other process on the GPU",
        ("gpu_shared",),
        (SLOW, reading("gpu_other_bytes", 6 << 30), reading("gpu_other_bytes", 0, "others")),
    ),
    Scenario(
        "fewer PCIe lanes",
        ("pcie_narrow",),
        (SLOW, reading("gpu_pcie_width", 4), reading("gpu_pcie_width", 16, "others")),
    ),
    Scenario(
        "memory that corrects errors",
        ("gpu_ecc_retries",),
        (SLOW, reading("gpu_ecc_corrected", 50), reading("gpu_ecc_corrected", 0, "others")),
    ),
    Scenario("XID", ("gpu_errors",), (reading("gpu_xid", 79), {**reading("gpu_xid_count", 1), "seconds": 1})),
    Scenario("ECC", ("gpu_errors",), ({**reading("gpu_ecc_errors", 2), "seconds": 1},)),
    Scenario(
        "an NVLink is down",
        ("nvlink_narrow",),
        (NETWORK, reading("gpu_nvlink_count", 17), reading("gpu_nvlink_count", 18, "others")),
        world=3,
    ),
    Scenario(
        "sockets, not InfiniBand",
        ("wrong_network",),
        (
            NETWORK,
            reading("nic_out_bytes", 4e6, "all"),
            reading("rdma_out_bytes", 100, "all"),
            reading("gpu_name", "H", "all"),
        ),
        culprit="cluster.env.NCCL_NET",
        nodes=True,
    ),
    Scenario(
        "a node on a slow interface",
        ("wrong_network",),
        (
            NETWORK,
            reading("nic_out_bytes", 4e6, "all"),
            reading("nic_limit_bytes_per_second", 1.25e9),
            reading("nic_limit_bytes_per_second", 1.25e10, "others"),
        ),
        culprit="node",
        nodes=True,
    ),
    Scenario(
        "fragmentation",
        ("fragmentation",),
        (reading("reserved_bytes", 60 << 30), reading("inactive_bytes", 20 << 30), reading("alloc_retries_count", 2)),
    ),
    Scenario(
        "node's memory is full",
        ("node_memory",),
        (reading("memory_used_bytes", 99e9), reading("memory_total_bytes", 100e9)),
        culprit="node",
    ),
    Scenario(
        "slow storage",
        ("checkpoint_cost",),
        ({"fault": "slow_disk", "seconds": 150, "bytes_per_s": 200 << 10, "on": "all"},),
        spec={"checkpoint": {"every": 20, "asynchronous": False}},
        culprit="checkpoint.every",
    ),
    Scenario(
        "evaluation takes long",
        ("evaluation_cost",),
        ({"fault": "slow_rank", "seconds": 3, "steps": LONG, "phase": "eval"},),
        spec={"eval": {"every": 20, "batches": 4}},
        culprit="eval.every",
    ),
    Scenario(
        "storage fails",
        ("storage_failing",),
        ({"fault": "storage_gone", "seconds": 150},),
        spec={"checkpoint": {"every": 200, "max_failures": 1000}},
        culprit="storage",
    ),
    Scenario("poisoned batch", ("bad_batch",), ({"fault": "loss_spike"},), culprit="step"),
    Scenario(
        "not finite", ("bad_batch",), ({"fault": "bad_number"},), spec={"recovery": {"on_nan": "skip"}}, culprit="step"
    ),
    Scenario(
        "learning rate rises too high",
        ("lr_too_high",),
        spec={"optim": {"lr": 0.5, "schedule": {"warmup": 2000}}},
        culprit="optim.lr",
    ),
    Scenario(
        "learning rate is 1000 times",
        ("lr_too_high",),
        ({"fault": "learning_rate", "factor": 1000.0, "steps": LONG, "on": "all"},),
        spec={"optim": {"lr": 1e-3, "schedule": {"warmup": 10}}},
        culprit="optim.lr",
    ),
    *(
        Scenario(
            f"a layer's {of} {does}",
            (rule,),
            ({**fault, "factor": factor},),
            spec={"observe": {"histograms": 4}},
            culprit="parameter",
        )
        for of, rule, fault, factors in (
            ("gradient", "layer_gradients", GRADIENT, (1e-6, 1e6)),
            ("output", "layer_activations", OUTPUT, (1e-6, 1e4)),
        )
        for does, factor in zip(("vanishes", "explodes"), factors, strict=True)
    ),
    Scenario(
        "expert imbalance",
        ("expert_imbalance",),
        ({"fault": "expert_imbalance", "on": "all", "experts": 2, "tokens": 0.7, "steps": LONG},),
        spec=EXPERTS,
        culprit="expert_rank",
    ),
    Scenario(
        "dead experts",
        ("dead_experts",),
        ({"fault": "expert_imbalance", "on": "all", "experts": 2, "tokens": 1.0, "steps": LONG},),
        spec={**EXPERTS, "parallel": {}},
        culprit="layer",
    ),
    Scenario("healthy", ()),
    Scenario("healthy experts", (), spec=EXPERTS),
    Scenario("healthy zero2 bf16", (), spec={"precision": "bf16", "parallel": {"strategy": "zero2"}}),
    Scenario(
        "healthy evaluations, checkpoints and histograms",
        (),
        spec={"eval": {"every": 500}, "checkpoint": {"every": 400}, "observe": {"histograms": 50}},
    ),
]


class SlowHook:
    """Sleeps in each step of rank 0, from the step in its options on."""

    def __init__(self, facts: Any) -> None:
        self.first = facts.options["first"]

    def on_step(self, record: Any) -> None:
        """Half a second."""
        if record.step >= self.first:
            time.sleep(0.5)


def train(number: int, world: int, port: int, spec: Any, folder: str, asked: Any, pipe: Any, node: str) -> None:
    """One rank, until it is killed."""
    os.environ.update(RANK=str(number), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(LOCAL_RANK=str(number), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    from raydist.worker import distributed, loop
    from raydist.worker.attempt import Job, MonitorChannel

    rank = distributed.start(gpus=0, threads=1, timeout_s=120, node_ip=node)
    job = Job(JobSpec.model_validate(spec), RunDir(f"{folder}/run"), f"{folder}/tokens", faults=asked)

    def push(steps: Any, events: Any) -> None:
        pipe.send((steps, events))

    loop.train(job, rank, MonitorChannel(push, lambda: None) if rank.first else None)


def play(scenario: Scenario, seed: int, world: int, folder: Path) -> dict[str, Any]:
    """Trains, and returns what was told first, the culprit, the time, and what else was told."""
    rng = np.random.default_rng([seed, *scenario.name.encode()])
    world = max(world, scenario.world)
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
    if any(one.get("phase") == "eval" for one in scenario.faults):  # only a step with an evaluation has that phase
        step = -(-step // spec["eval"]["every"]) * spec["eval"]["every"]
    if scenario.hook:
        spec["hooks"] = [{"name": "doctor_ranks:SlowHook", "options": {"first": step}}]
    asked = [
        {**{k: v for k, v in one.items() if k != "on"}, "rank": r, "step": step}
        for one in scenario.faults
        for r in range(world)
        if one.get("on") == "all" or (r != rank if one.get("on") == "others" else r == rank)
    ]
    nodes = [f"127.0.0.{1 + r * scenario.nodes}" for r in range(world)]
    run = RunDir(folder / "run")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=train, args=(r, world, port, spec, str(folder), asked, theirs, nodes[r]))
        for r in range(world)
    ]
    for process in ranks:
        process.start()
    rows: list[Any] = []
    told_to = SimpleNamespace(observe=SimpleNamespace(remote=lambda new, sent: rows.extend(new)))
    monitors = [NodeMonitor(run.uri, node, told_to, 1.0, str(folder)) for node in dict.fromkeys(nodes)]
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
                told_by = (Event.from_dict(e) for e in said)
                events += [sizes(e) if e.kind == "histograms" else e for e in told_by]
            trained = steps[-1]["step"] if steps else trained
            now, new = time.time(), rows[:]
            del rows[: len(new)]
            if begun is None and trained >= (step if scenario.rules else 1):
                notes = faults.read_notes(run)
                begun = next((note["at"] for note in notes.values()), now) if scenario.faults else now
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
        for each in monitors:
            each.close()
    assert not diagnosis.problems, diagnosis.problems
    assert not scenario.faults or faults.read_notes(run), "no fault was injected"
    at, one = told[0] if told else (None, None)
    took = at - begun if at and begun and (scenario.faults or scenario.hook) else None
    named = one is not None and {
        "rank": one.rank == rank, "step": one.culprit.get("step") == step, "expert_rank": one.culprit.get("expert_rank") == 0,
        "node": one.culprit.get("node") == nodes[rank], 
        "parameter": one.culprit.get("parameter") in (LAYER, LAYER.removesuffix(".weight")),
        "layer": one.culprit.get("parameter", "").startswith("blocks."),
    }.get(scenario.culprit, one.culprit.get("setting") == scenario.culprit)  # fmt: skip
    return {
        "scenario": scenario.name, "seed": seed, "told": one.rule if one else "nothing", "steps": trained,
        "culprit": named, "cause": one is not None and one.rule in scenario.rules,
        "seconds": None if took is None else round(took, 1), "load": round(os.getloadavg()[0], 1),
        "what": one.what if one else "", "others": [other.rule for _, other in told[1:]],
    }  # fmt: skip


def main() -> None:
    """Runs, prints, writes results/doctor_ranks.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--each", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--only", default="", help="scenarios whose name contains this; writes nothing")
    options = parser.parse_args()
    found = []
    for scenario in SCENARIOS:
        for seed in range(options.first, options.first + options.each) if options.only in scenario.name else ():
            with tempfile.TemporaryDirectory(prefix="raydist-doctor-") as folder:
                from raydist.data.prepare import prepare

                texts = [Path(folder, f"{number}.txt") for number in range(100)]
                for text in texts:  # held-out documents are chosen by what they say
                    text.write_text(f"so it goes. {text.stem} " + "so it goes. " * 200)
                prepare([str(text) for text in texts], f"{folder}/tokens", eval_fraction=0.1)
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
        "median_seconds": float(np.median([o["seconds"] for o in faulty if o["seconds"] is not None and o["cause"]])),
        "seconds": {s.name: [o["seconds"] for o in faulty if o["scenario"] == s.name] for s in SCENARIOS if s.rules},
        "loads": [one["load"] for one in found],
    }
    print(result)
    if not options.only:
        write("doctor_ranks", result)


if __name__ == "__main__":
    main()
