"""Scores the rules of raydist.diagnosis on simulated runs with injected faults, and on healthy ones. No timing of this machine.

    python benchmarks/doctor.py [--each 10] [--held-back]

Each scenario is a run of 2 to 8 ranks that is simulated second by second: steps that wait for the slowest rank, with noise that
lasts (autoregressive, as other users of a host make it), uneven documents, evaluations and checkpoints; its rows, steps and events
go to the engine every 2 seconds, as in the run's monitor. A fault begins at a random second on a random rank. All follows from the
seed, and no two scenarios have the same noise. Seeds of `--held-back` are others, and its severities are from wider ranges.

culprit: the first finding after the fault names its rank, node or setting; cause: it is of the right rule; false: any finding of a
healthy run, or before a fault. `seconds`: from the fault to the finding. The confusion matrix counts the rule that was told first.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from common import write

from raydist.diagnosis import Diagnosis
from raydist.records import Event, Finding

START = 1_700_000_000.0
EVERY = 2
"""Seconds between two rounds of the monitor."""


@dataclass
class Run:
    """A simulated run: what it is now, and its counters. `p`: parameters of the scenario."""

    rng: np.random.Generator
    ranks: int
    nodes: int
    gpus: bool
    seconds: int
    step_s: float
    crowd: float
    uneven: float
    comm: float = 0.1
    every: int = 60
    fault_at: int = 10**9
    rank: int = 0
    size: float = 0.0
    step: int = 0
    attempt: int = 1
    totals: list[dict[str, float]] = field(default_factory=list)
    node_totals: list[dict[str, float]] = field(default_factory=list)
    before: list[dict[str, float]] = field(default_factory=list)
    done: float = 1.0
    """Of the newest step: `totals` are those at its end, `before` those at its start."""
    load: Any = None
    text: dict[str, Any] = field(default_factory=dict)
    loss_hook: Callable[[Run, float, float], tuple[float, float]] | None = None
    now: float = 0.0

    def __post_init__(self) -> None:
        self.totals = [Counter() for _ in range(self.ranks)]
        self.node_totals = [Counter() for _ in range(self.nodes)]
        self.load = np.zeros(self.ranks)

    @property
    def on(self) -> bool:
        """Whether the fault is active."""
        return self.now >= self.fault_at

    def node(self, rank: int) -> int:
        """The number of its node."""
        return rank * self.nodes // self.ranks


Hook = Callable[[Run, int, dict[str, float]], None]
"""Changes what one rank does in a step: (run, rank, seconds and counters of the step)."""


def simulate(run: Run, hook: Hook) -> Iterator[tuple[list[Any], list[Any], list[Event]]]:
    """What the monitor gets every EVERY seconds. `hook` is called for each rank and step."""
    rng = run.rng
    rows: list[Any] = []
    steps: list[Any] = []
    events = [Event("attempt_started", START, {"attempt": 1, "world_size": run.ranks, "resume_step": 0})]
    base = run.step_s * (1 - run.comm)
    second, clock, began = 0, 0.0, 0.0
    while second < run.seconds:
        while clock < second + 1:  # do whole steps, and spread their seconds evenly over the time
            run.step += 1
            run.now = began = clock
            run.before = [Counter(t) for t in run.totals]
            run.load = 0.9 * run.load + 0.1 * run.crowd * rng.exponential(size=run.ranks)
            per: list[dict[str, float]] = []
            for r in range(run.ranks):
                own = (
                    base
                    * float(np.exp(run.uneven * rng.standard_normal() - run.uneven**2 / 2))
                    * (1 + 0.02 * rng.standard_normal())
                )
                delay = own * float(run.load[r])
                one = Counter({"compute": own + delay, "cpu": own * 1.05, "run_delay": delay, "data": 0.002 * run.step_s,
                               "gc": 0.002 * own, "faults": 0.01, "comm": run.comm * run.step_s, "throttled": 0.0})  # fmt: skip
                hook(run, r, one)
                per.append(one)
            until = max(one["compute"] + one["data"] for one in per)
            comm = max(one["comm"] for one in per)
            extra = _between(run, events, START + clock)
            for r, one in enumerate(per):
                wait = until - one["compute"] - one["data"] + comm
                t = run.totals[r]
                t["forward_seconds"] += one["compute"] / 3
                t["backward_seconds"] += 2 * one["compute"] / 3 + wait
                t["all_reduce_exposed_seconds"] += wait
                t["data_seconds"] += one["data"]
                t["eval_seconds"] += extra.get("eval", 0.0)
                t["save_seconds"] += extra.get("save", 0.0)
                t["cpu_seconds"] += one["cpu"]
                t["run_delay_seconds"] += one["run_delay"]
                t["throttled_seconds"] += one["throttled"]
                t["gc_seconds"] += one["gc"]
                t["major_faults_count"] += one["faults"]
                t["stopped_count"] += one["stopped"]
                t["held_seconds"] += one["held"]
                t["alloc_retries_count"] += one["retries"]
                t["all_reduce_count"] += one.get("messages", 20)
                t["all_reduce_bytes"] += one.get("bytes", 80 << 20)
                n = run.node_totals[run.node(r)]
                n["nic_out_bytes"] += one.get("bytes", 80 << 20)
                n["nic_out_packets"] += one.get("bytes", 80 << 20) / 1400
                n["retransmits_count"] += one["again"]
                n["disk_read_bytes"] += one["reads"]
            clock += until + comm + sum(extra.values())
            steps.append(_record(run, until + comm, per[0]["data"]))
        at = START + second + 1
        run.done = min(1.0, (second + 1 - began) / (clock - began))
        for r in range(run.ranks):
            rows.append(_rank_row(run, r, at + 0.1 * float(rng.random())))
        for n in range(run.nodes):
            rows.append(_node_row(run, n, at))
        if run.gpus:
            rows += [_gpu_row(run, r, at) for r in range(run.ranks)]
        second += 1
        if second % EVERY == 0:
            run.now = second
            yield rows, steps, events
            rows, steps, events = [], [], []


def _between(run: Run, events: list[Event], at: float) -> dict[str, float]:
    """An evaluation or a checkpoint after some steps: seconds that all ranks spend."""
    made: dict[str, float] = {}
    if run.step == 1:
        stages = {"import": 5.0, "build": 4.0}
        first = {"attempt": run.attempt, "step": 1, "seconds": 9.0, "stages": stages, "repeated_steps": 0}
        events.append(Event("first_step", at, first))
    if run.step % run.every == 0:
        stall, write = run.text.get("save", (0.02 * run.every * run.step_s, 0.2 * run.every * run.step_s))
        if run.on or "save" not in run.text:
            made["save"] = stall
            saved = {"step": run.step, "bytes": 1 << 30, "seconds": write, "stall_seconds": stall}
            events.append(Event("checkpoint_saved", at + write, saved))
        made["eval"] = 0.05 * run.every * run.step_s
        loss = (
            run.text["eval"](run)
            if "eval" in run.text
            else 3.0 / (1 + run.step / 300) + 0.01 * run.rng.standard_normal()
        )
        events.append(Event("eval", at, {"step": run.step, "loss": float(loss), "tokens": 1000}))
    if "event" in run.text and run.on and not run.text.get("sent"):
        made_event = run.text["event"](run)
        if made_event is not None:
            run.text["sent"] = True
            events.append(Event(made_event[0], at, made_event[1]))
    if "loads" in run.text and run.step % 10 == 0:
        events.append(Event("expert_loads", at, run.text["loads"](run)))
    return made


def _record(run: Run, seconds: float, data: float) -> dict[str, Any]:
    noise = run.rng.standard_normal()
    loss = 2.0 + 4.0 / (1 + run.step / 40) + 0.05 * noise
    norm = 1.0 * float(np.exp(0.25 * run.rng.standard_normal()))
    if run.loss_hook is not None and run.on:
        loss, norm = run.loss_hook(run, loss, norm)
    return {"step": run.step, "loss": loss, "lr": 1e-3, "grad_norm": norm, "tokens": 4096, "seconds": seconds,
            "data_seconds": data, "world_size": run.ranks, "attempt": run.attempt, "samples_hash": f"{run.step:016x}",
            "grad_noise_scale": 40.0}  # fmt: skip


def _totals(run: Run, rank: int) -> dict[str, float]:
    before = run.before[rank]
    return {
        name: before.get(name, 0.0) + run.done * (value - before.get(name, 0.0))
        for name, value in run.totals[rank].items()
    }


def _rank_row(run: Run, rank: int, at: float) -> dict[str, Any]:
    node = run.node(rank)
    memory = 2.0e9 + 1e7 * float(run.rng.standard_normal()) + run.text.get("anon", lambda run, rank: 0.0)(run, rank)
    row = {"kind": "rank", "rank": rank, "attempt": run.attempt, "at": at, "host": f"h{node}", "node": f"10.0.0.{node + 1}",
           "step": run.step, **_totals(run, rank), "anon_bytes": int(memory)}  # fmt: skip
    if run.gpus:
        inactive = run.text.get("inactive", lambda run, rank: 0.02)(run, rank)
        row |= {"gpu": rank, "reserved_bytes": 60 << 30, "inactive_bytes": int(inactive * (60 << 30))}
    return row


def _node_row(run: Run, node: int, at: float) -> dict[str, Any]:
    used = 0.5 + 0.01 * float(run.rng.standard_normal()) + run.text.get("used", lambda run, node: 0.0)(run, node)
    queue = run.text.get("queue", lambda run, node: 3e4 * float(run.rng.random() < 0.3))(run, node)
    return {"kind": "node", "at": at, "host": f"h{node}", "node": f"10.0.0.{node + 1}", **run.node_totals[node],
            "cpu_util": 0.6, "cpu_count": 8, "steal_seconds": 0.0, "memory_used_bytes": int(min(used, 0.999) * 64e9),
            "memory_total_bytes": int(64e9), "link_queue_bytes": int(queue),
            "link_queue_peer": f"10.0.0.{(node + 1) % run.nodes + 1}" if queue else ""}  # fmt: skip


def _gpu_row(run: Run, rank: int, at: float) -> dict[str, Any]:
    node = run.node(rank)
    noise = run.rng.standard_normal
    row = {"kind": "gpu", "at": at, "host": f"h{node}", "node": f"10.0.0.{node + 1}", "gpu": rank, "rank": rank,
           "gpu_sm_clock_hz": 1.7e9 * (1 + 0.01 * float(noise())), "gpu_throttle": "power_cap" if run.rng.random() < 0.2 else "",
           "gpu_temperature_celsius": 62 + 3 * float(noise()), "gpu_power_watts": 600 + 20 * float(noise()),
           "gpu_power_limit_watts": 700.0, "gpu_other_bytes": 0, "gpu_pcie_width": 16, "gpu_xid_count": 0,
           "gpu_ecc_errors": 0}  # fmt: skip
    if run.on and rank == run.rank:
        row |= run.text.get("gpu", {})
    return row


# --- the faults: name -> (expected rules, culprit, how to set it up). A hook changes rank r's step.


def _slower(run: Run, r: int, one: dict[str, float]) -> float:
    """Seconds by which the faulty rank's step is longer; 0 for others."""
    return run.size * run.step_s if run.on and r == run.rank else 0.0


def stolen(run: Run, r: int, one: dict[str, float]) -> None:
    """Another process has the processor."""
    more = _slower(run, r, one)
    one["compute"] += more
    one["run_delay"] += more * 0.95


def throttled(run: Run, r: int, one: dict[str, float]) -> None:
    """A quota."""
    more = _slower(run, r, one)
    one["compute"] += more
    one["throttled"] += more * 0.97
    one["run_delay"] += more * 0.9


def stopped(run: Run, r: int, one: dict[str, float]) -> None:
    """SIGSTOP in bursts: seen with the probability of being stopped."""
    more = _slower(run, r, one)
    one["compute"] += more
    one["stopped"] = float(run.rng.poisson(more))
    one["held"] = 0.9 * more


def swapping(run: Run, r: int, one: dict[str, float]) -> None:
    """Pages from a disk."""
    more = _slower(run, r, one)
    one["compute"] += more
    one["faults"] += more / 4e-4
    one["reads"] += more / 4e-4 * 4096


def collecting(run: Run, r: int, one: dict[str, float]) -> None:
    """Python's collector."""
    more = _slower(run, r, one)
    one["compute"] += more
    one["gc"] += 0.95 * more
    one["cpu"] += more


def waiting(run: Run, r: int, one: dict[str, float]) -> None:
    """A sleep or a lock in the user's code."""
    one["compute"] += _slower(run, r, one)


def busier(run: Run, r: int, one: dict[str, float]) -> None:
    """More work."""
    more = _slower(run, r, one)
    one["compute"] += more
    one["cpu"] += more


def loader(run: Run, r: int, one: dict[str, float]) -> None:
    """One rank's loader."""
    one["data"] += _slower(run, r, one)


def all_data(run: Run, r: int, one: dict[str, float]) -> None:
    """All loaders."""
    one["data"] += run.size * run.step_s * (1 + 0.05 * float(run.rng.standard_normal())) if run.on else 0.0


def link(run: Run, r: int, one: dict[str, float]) -> None:
    """A slow link of a node: all wait."""
    if run.on:
        one["comm"] += (0.6 + run.size) * run.step_s
        one["again"] += 20 if run.node(r) == run.node(run.rank) else 1


def small(run: Run, r: int, one: dict[str, float]) -> None:
    """Many small messages, from the start."""
    one["comm"] = (1.5 + run.size) * run.step_s
    one["messages"], one["bytes"] = 4000, 80 << 20


def quiet(run: Run, r: int, one: dict[str, float]) -> None:
    """Nothing."""


def retries(run: Run, r: int, one: dict[str, float]) -> None:
    """The allocator retries."""
    if run.on and r == run.rank:
        one["retries"] = float(run.rng.poisson(0.6 * run.step_s))


def _spike(run: Run, loss: float, norm: float) -> tuple[float, float]:
    if "hit" not in run.text:
        run.text["hit"] = run.step
    since = run.step - run.text["hit"]
    jump = loss * (0.5 + 2 * run.size)
    return (
        (loss + jump, norm * (4 + 20 * run.size))
        if since == 0
        else (loss + 0.15 * jump * 0.5**since, norm * (1 + 0.5**since))
    )


def _diverge(run: Run, loss: float, norm: float) -> tuple[float, float]:
    since = run.step - run.text.setdefault("hit", run.step)
    rise = loss * (0.4 + run.size) * (1 - np.exp(-since / 15))
    return loss + float(rise) + 0.1 * float(run.rng.standard_normal()), norm * float(1 + 4 * (1 - np.exp(-since / 10)))


def _overflow(run: Run, loss: float, norm: float) -> tuple[float, float]:
    return loss, float("inf") if run.rng.random() < 0.4 + 0.5 * run.size else norm


def _overfit(run: Run) -> float:
    turn = int(run.text.setdefault("turn", run.step)) if run.on else run.step
    rise = (0.02 + 0.05 * run.size) * (run.step - turn) / run.every
    return 3.0 / (1 + turn / 300) + rise + 0.001 * float(run.rng.standard_normal())


def _loads(run: Run) -> dict[str, Any]:
    loads = run.rng.multinomial(4096, run.rng.dirichlet(np.full(16, 20.0)))
    if run.on and run.text.get("kills"):
        loads[[3, 7]] = 0
    if run.on and run.text.get("prefers"):  # the experts of the second of four ranks
        loads[4:8] = loads[4:8] * (2 + 4 * run.size)
    return {
        "step": run.step,
        "imbalance": 1.5,
        "exchanged": 0,
        "layers": {"blocks.1.moe": {"loads": loads.tolist(), "bias": None}},
    }


def _nan(run: Run) -> tuple[str, dict[str, Any]]:
    return "non_finite", {"step": run.step, "action": "skip", "loss": None, "cause": f"step {run.step}: the loss is not finite",
                          "ranks": [{"rank": run.rank, "micro_batch": 0, "loss": None}], "samples_hash": "ab"}  # fmt: skip


def _hang(run: Run) -> tuple[str, dict[str, Any]]:
    return "failure", {"attempt": 1, "rank": run.rank, "fault": "worker_hung", "traceback": "", "echoes": run.ranks - 1,
                       "cause": "it has started 41 collectives of group 0, others 42, the last all_reduce"}  # fmt: skip


@dataclass(frozen=True)
class Scenario:
    """`rules`: the right answers; `culprit`: "rank", "node" or a setting; `least`, `most`: size of the fault."""

    name: str
    rules: tuple[str, ...]
    culprit: str
    hook: Hook = quiet
    least: float = 0.4
    most: float = 1.5
    gpus: bool = False
    nodes: int = 1
    seconds: int = 150
    text: Callable[[Run], dict[str, Any]] = lambda run: {}
    loss: Callable[[Run, float, float], tuple[float, float]] | None = None
    crowd: float = 0.15
    uneven: float = 0.1
    step_s: tuple[float, float] = (0.1, 1.5)
    begins: bool = False
    """The fault is there from the start."""


def _gpu(**values: Any) -> Callable[[Run], dict[str, Any]]:
    return lambda run: {"gpu": values}


SCENARIOS = [
    Scenario("cpu hog", ("cpu_stolen",), "rank", stolen),
    Scenario("cpu quota", ("cpu_throttled",), "rank", throttled),
    Scenario("SIGSTOP bursts", ("process_stopped",), "rank", stopped),
    Scenario("swap", ("swapping",), "rank", swapping),
    Scenario("garbage collector", ("gc_pauses",), "rank", collecting),
    Scenario("user's code waits", ("own_code",), "rank", waiting),
    Scenario("user's code does more", ("own_code",), "rank", busier),
    Scenario("slow loader on one rank", ("slow_loader",), "rank", loader),
    Scenario("slow data everywhere", ("data_bound",), "data.prefetch", all_data),
    Scenario(
        "GPU too hot",
        ("gpu_throttled",),
        "rank",
        waiting,
        0.4,
        1.0,
        True,
        text=lambda run: {
            "gpu": {
                "gpu_sm_clock_hz": 1.7e9 / (1 + run.size),
                "gpu_throttle": "thermal",
                "gpu_temperature_celsius": 88.0,
            }
        },
    ),
    Scenario(
        "GPU power limit",
        ("gpu_throttled",),
        "rank",
        waiting,
        0.4,
        1.0,
        True,
        text=lambda run: {"gpu": {"gpu_sm_clock_hz": 1.7e9 / (1 + run.size), "gpu_throttle": "power_cap"}},
    ),
    Scenario(
        "other process on the GPU", ("gpu_shared",), "rank", waiting, 0.4, 1.5, True, text=_gpu(gpu_other_bytes=6 << 30)
    ),
    Scenario("fewer PCIe lanes", ("pcie_narrow",), "rank", waiting, 0.4, 1.5, True, text=_gpu(gpu_pcie_width=4)),
    Scenario("XID", ("gpu_errors",), "rank", quiet, gpus=True, text=_gpu(gpu_xid_count=1, gpu_xid=79)),
    Scenario("ECC", ("gpu_errors",), "rank", quiet, gpus=True, text=_gpu(gpu_ecc_errors=3)),
    Scenario(
        "slow link",
        ("slow_link",),
        "node",
        link,
        0.4,
        2.0,
        nodes=2,
        text=lambda run: {
            "queue": lambda run, node: (
                3e5 * (0.6 + run.rng.random())
                if run.on and node == run.node(run.rank)
                else 3e4 * float(run.rng.random() < 0.3)
            )
        },
    ),
    Scenario("small messages", ("comm_bound",), "parallel.bucket_mb", small, 0.2, 1.0, True, 2, begins=True),
    Scenario(
        "slow storage",
        ("checkpoint_cost",),
        "checkpoint.every",
        quiet,
        seconds=400,
        step_s=(0.2, 0.4),
        text=lambda run: {
            "save": ((0.15 + 0.3 * run.size) * run.every * run.step_s, (1.3 + run.size) * run.every * run.step_s)
        },
    ),
    Scenario(
        "fragmentation",
        ("fragmentation",),
        "rank",
        retries,
        gpus=True,
        text=lambda run: {"inactive": lambda run, rank: 0.35 if run.on and rank == run.rank else 0.02},
    ),
    Scenario(
        "node's memory fills",
        ("node_memory",),
        "node",
        quiet,
        text=lambda run: {
            "used": lambda run, node: (
                min(0.5, 0.012 * max(0.0, run.now - run.fault_at)) if node == run.node(run.rank) else 0.0
            )
        },
    ),
    Scenario(
        "host leak",
        ("leak",),
        "rank",
        quiet,
        seconds=2700,
        step_s=(2.0, 4.0),
        text=lambda run: {
            "anon": lambda run, rank: (
                2.5e5 * (1 + run.size) * max(0.0, run.now - run.fault_at) if rank == run.rank else 0.0
            )
        },
    ),
    Scenario("poisoned batch", ("bad_batch",), "step", quiet, 0.1, 1.0, loss=_spike, step_s=(0.1, 0.6)),
    Scenario("learning rate too high", ("lr_too_high",), "optim.lr", quiet, 0.2, 1.5, loss=_diverge, step_s=(0.1, 0.6)),
    Scenario(
        "loss scale collapses", ("loss_scale",), "precision.params", quiet, 0.1, 1.0, loss=_overflow, step_s=(0.1, 0.6)
    ),
    Scenario("not finite, from calm", ("bad_batch",), "step", quiet, text=lambda run: {"event": _nan}),
    Scenario(
        "not finite, after growth",
        ("lr_too_high",),
        "optim.lr",
        quiet,
        loss=lambda run, loss, norm: (loss, norm * 1.08 ** min(run.step - run.text.setdefault("hit", run.step), 40)),
        step_s=(0.1, 0.4),
        text=lambda run: {"event": lambda run: _nan(run) if run.step - run.text.get("hit", run.step) > 45 else None},
    ),
    Scenario(
        "overfitting",
        ("overfitting",),
        "train.steps",
        quiet,
        0.2,
        1.0,
        seconds=300,
        step_s=(0.1, 0.3),
        text=lambda run: {"eval": _overfit},
    ),
    Scenario(
        "dead experts",
        ("dead_experts",),
        "parameter",
        quiet,
        text=lambda run: {"loads": _loads, "kills": True},
        step_s=(0.1, 0.5),
    ),
    Scenario(
        "expert imbalance",
        ("expert_imbalance",),
        "parameter",
        quiet,
        text=lambda run: {"loads": _loads, "prefers": True},
        step_s=(0.1, 0.5),
    ),
    Scenario("asymmetric collectives", ("stopped",), "rank", quiet, text=lambda run: {"event": _hang}),
]
HEALTHY = [
    Scenario("quiet", (), "", crowd=0.02, uneven=0.02),
    Scenario("busy host", (), "", crowd=0.6, uneven=0.1),
    Scenario("very busy host", (), "", crowd=1.5, uneven=0.1),
    Scenario("uneven documents", (), "", uneven=0.35),
    Scenario("very uneven documents", (), "", uneven=0.6),
    Scenario("several nodes", (), "", nodes=2, gpus=True),
    Scenario("long steps", (), "", step_s=(4.0, 12.0)),
    Scenario("a router that is not even", (), "", text=lambda run: {"loads": _loads}),
    Scenario("a long run", (), "", seconds=2700, step_s=(2.0, 4.0)),
]


@dataclass
class Score:
    """One scenario's result. `told`: the rule that was told first, "" if none."""

    name: str
    told: str
    culprit: bool
    cause: bool
    false: list[str]
    seconds: float | None


def play(scenario: Scenario, seed: int, wide: bool) -> Score:
    """Simulates one scenario."""
    rng = np.random.default_rng([seed, 0xD0C, *scenario.name.encode()])
    nodes = scenario.nodes
    ranks = int(rng.choice([2, 3, 4, 8] if nodes == 1 else [2, 4, 8]))
    step_s = float(rng.uniform(*scenario.step_s))
    stretch = 1.25 if wide else 1.0
    run = Run(rng, ranks, nodes, scenario.gpus, scenario.seconds, step_s, scenario.crowd * float(rng.uniform(0.3, 1.2)),
              scenario.uneven * float(rng.uniform(0.5, 1.2)))  # fmt: skip
    run.every = max(20, int(rng.uniform(15, 40) / step_s))
    run.rank = int(rng.integers(ranks))
    run.size = float(rng.uniform(scenario.least / stretch, scenario.most * stretch))
    healthy = not scenario.rules
    if not healthy:
        run.fault_at = 0 if scenario.begins else int(rng.uniform(40, 80))
    run.text = scenario.text(run)
    run.loss_hook = scenario.loss
    spec = {"optim": {"lr": 1e-3, "schedule": {"warmup": 0.1}}, "train": {"global_batch": 64, "steps": 10**6},
            "parallel": {"pipeline": 1, "expert": 4}, "observe": {"grad_noise": 10}, "comm": {"compress": None},
            "data": {"prefetch": 2}}  # fmt: skip
    diagnosis = Diagnosis(spec=spec)
    false: list[str] = []
    first: tuple[float, Finding] | None = None
    for rows, steps, events in simulate(run, scenario.hook):
        for finding in diagnosis.observe(rows, steps, events):
            if finding.state == "over":
                continue
            if healthy or not run.on:
                false.append(f"{scenario.name} {seed}: {finding.what}")
            elif first is None:
                first = run.now, finding
        if first is not None and run.now - first[0] > 30:
            break
    assert not diagnosis.problems, diagnosis.problems
    if first is None:
        return Score(scenario.name, "", False, False, false, None)
    at, finding = first
    named = {"rank": finding.rank == run.rank, "node": finding.culprit.get("node") == f"10.0.0.{run.node(run.rank) + 1}",
             "step": "step" in finding.culprit, "parameter": "parameter" in finding.culprit}  # fmt: skip
    right = named.get(scenario.culprit, finding.culprit.get("setting") == scenario.culprit)
    return Score(scenario.name, finding.rule, right, finding.rule in scenario.rules, false, at - run.fault_at)


def main() -> None:
    """Runs, prints, and writes results/doctor.json or results/doctor_held_back.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--each", type=int, default=10, help="runs of each scenario")
    parser.add_argument(
        "--held-back", action="store_true", help="other seeds, wider ranges: once, after all rules are written"
    )
    parser.add_argument("--only", default="", help="scenarios whose name contains this; writes nothing")
    options = parser.parse_args()
    first_seed = 50_000 if options.held_back else 0
    chosen = [s for s in [*SCENARIOS, *HEALTHY] if options.only in s.name]
    matrix: dict[str, Counter[str]] = {}
    scores: list[Score] = []
    for scenario in chosen:
        own = [play(scenario, first_seed + i, options.held_back) for i in range(options.each)]
        scores += own
        matrix[scenario.name] = Counter(score.told or "nothing" for score in own)
        seconds = sorted(s.seconds for s in own if s.seconds is not None)
        middle = f"{seconds[len(seconds) // 2]:6.0f} s" if seconds else ""
        culprits, causes = sum(s.culprit for s in own), sum(s.cause for s in own)
        print(
            f"{scenario.name:28} culprit {culprits:3} cause {causes:3} of {len(own)} {middle}  {dict(matrix[scenario.name])}",
            flush=True,
        )
    faulty = [s for s in scores if s.name not in {h.name for h in HEALTHY}]
    healthy = [s for s in scores if s.name in {h.name for h in HEALTHY}]
    false = [text for score in scores for text in score.false]
    slow = {"host leak", "slow storage", "overfitting"}
    times = sorted(s.seconds for s in faulty if s.seconds is not None and s.name not in slow)
    result = {
        "scenarios": len(scores),
        "culprit": sum(s.culprit for s in faulty) / max(len(faulty), 1),
        "cause": sum(s.cause for s in faulty) / max(len(faulty), 1),
        "healthy": len(healthy),
        "false": len(false),
        "median_seconds": times[len(times) // 2] if times else None,
        "worst_seconds": times[-1] if times else None,
        "matrix": {name: dict(counts) for name, counts in matrix.items()},
    }
    for text in false:
        print("FALSE", text)
    print({name: value for name, value in result.items() if name != "matrix"})
    if not options.only:
        write("doctor_held_back" if options.held_back else "doctor", result)


if __name__ == "__main__":
    main()
