"""A run that is simulated second by second, as its monitor sees it: for benchmarks/doctor.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raydist.records import Event

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

    def restart(self, second: int, events: list[Event]) -> int:
        """A rank has died: a new attempt, with more or fewer ranks. Returns the second of its first step."""
        self.attempt += 1
        self.ranks = max(2, self.ranks + int(self.rng.integers(-1, 2)))
        self.step = max(0, self.step - int(self.rng.integers(0, 20)))
        self.__post_init__()
        self.before, self.text["begin"] = [], self.step
        first = second + int(self.rng.integers(3, 25))
        begun = {"attempt": self.attempt, "world_size": self.ranks, "resume_step": self.step}
        events.append(Event("attempt_started", START + second, begun))
        return first

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
        if second in run.text.get("restarts", ()):
            second = run.restart(second, events)
            clock = began = float(second)
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
    if run.step == run.text.get("begin", 0) + 1:
        stages = {"import": 5.0, "build": 4.0}
        first = {"attempt": run.attempt, "step": run.step, "seconds": 9.0, "stages": stages, "repeated_steps": 0,
                 "steps_per_epoch": run.text.get("steps_per_epoch")}  # fmt: skip
        events.append(Event("first_step", at, first))
        if "loads" in run.text:
            events.append(Event("experts", at, {"layers": {"blocks.1.moe": 16}}))
    if run.step % run.every == 0:
        stall, write = run.text.get("save", (0.02 * run.every * run.step_s, 0.2 * run.every * run.step_s))
        if run.on or "save" not in run.text:
            made["save"] = stall
            saved = {"step": run.step, "bytes": 1 << 30, "seconds": write, "stall_seconds": stall}
            events.append(Event("checkpoint_saved", at + write, saved))
        made["eval"] = (run.text.get("eval_share", 0.05) if run.on else 0.05) * run.every * run.step_s
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
    if "sizes" in run.text and run.step % 10 == 0:
        events.append(Event("layer_sizes", at, {"step": run.step, **run.text["sizes"](run)}))
    return made


def _record(run: Run, seconds: float, data: float) -> dict[str, Any]:
    noise = run.rng.standard_normal()
    loss = 2.0 + 4.0 / (1 + run.step / 40) + 0.05 * noise
    norm = 1.0 * float(np.exp(0.25 * run.rng.standard_normal()))
    if run.loss_hook is not None and run.on:
        loss, norm = run.loss_hook(run, loss, norm)
    return {"step": run.step, "loss": loss, "lr": 1e-3, "grad_norm": norm, "tokens": 4096, "seconds": seconds,
            "data_seconds": data, "world_size": run.ranks, "attempt": run.attempt, "samples_hash": f"{run.step:016x}",
            "grad_noise_scale": 40.0, "expert_loads": run.text["loads"](run) if "loads" in run.text else None}  # fmt: skip


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
            "link_queue_peer": f"10.0.0.{(node + 1) % run.nodes + 1}" if queue else "", "nic": "eth0",
            "nic_limit_bytes_per_second": 12.5e9, **run.text.get("node", lambda run, node: {})(run, node)}  # fmt: skip


def _gpu_row(run: Run, rank: int, at: float) -> dict[str, Any]:
    node = run.node(rank)
    noise = run.rng.standard_normal
    row = {"kind": "gpu", "at": at, "host": f"h{node}", "node": f"10.0.0.{node + 1}", "gpu": rank, "rank": rank,
           "gpu_sm_clock_hz": 1.7e9 * (1 + 0.01 * float(noise())), "gpu_throttle": "power_cap" if run.rng.random() < 0.2 else "",
           "gpu_temperature_celsius": 62 + 3 * float(noise()), "gpu_power_watts": 600 + 20 * float(noise()),
           "gpu_power_limit_watts": 700.0, "gpu_other_bytes": 0, "gpu_pcie_width": 16, "gpu_nvlink_count": 18,
           "gpu_name": "H", "gpu_xid_count": 0,
           "gpu_ecc_errors": 0, "gpu_ecc_corrected": _corrected(run, rank)}  # fmt: skip
    if run.on and rank == run.rank:
        row |= run.text.get("gpu", {})
    return row


def _corrected(run: Run, rank: int) -> int:
    """Errors that the GPU's memory has corrected so far."""
    made: dict[int, int] = run.text.setdefault("corrected", {})
    rate = run.text.get("ecc", lambda run, rank: 0.0)(run, rank)
    made[rank] = made.get(rank, 0) + int(run.rng.poisson(rate) if rate else 0)
    return made[rank]
