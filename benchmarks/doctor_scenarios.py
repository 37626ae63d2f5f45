"""The faults of benchmarks/doctor.py and its healthy runs: what each does to a simulated run, and the right answer.

A hook changes the step of rank r.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from doctor_run import Hook, Run


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


def all_links(run: Run, r: int, one: dict[str, float]) -> None:
    """All wait for the network, from the start."""
    one["comm"] = (0.8 + run.size) * run.step_s


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


def _sizes(run: Run) -> dict[str, Any]:
    """Gradients of 40 parameters, with sizes of their own that drift; of one of them vanishing or exploding."""
    own = run.text.setdefault("own", 10.0 ** run.rng.uniform(-5, -2, 40))
    run.text["drift"] = 0.9 * run.text.get("drift", 0.0) + 0.3 * run.rng.standard_normal(40)
    sizes = own * np.exp(run.text["drift"] - 0.002 * run.step)
    if run.on and run.text.get("goes"):
        since = run.step - run.text.setdefault("hit", run.step)
        sizes[17] *= np.exp(run.text["goes"] * min(0.15 * since, 7.5 + 3 * run.size))
    return {"step": run.step, "sizes": {f"blocks.{i}.weight": float(size) for i, size in enumerate(sizes)}}


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


def _unsaved(run: Run) -> tuple[str, dict[str, Any]]:
    return "checkpoint_failed", {"step": run.step, "rank": run.rank, "cause": "OSError: [Errno 5] Input/output error"}


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
    ranks: tuple[int, ...] = ()
    """Possible numbers of ranks; (): 2 to 8."""


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
    Scenario(
        "sockets, not InfiniBand",
        ("wrong_network",),
        "cluster.env.NCCL_NET",
        all_links,
        0.2,
        2.0,
        True,
        2,
        text=lambda run: {"node": lambda run, node: {"rdma_out_bytes": 1e5 * run.now}},
        begins=True,
    ),
    Scenario(
        "a node on a slow interface",
        ("wrong_network",),
        "node",
        all_links,
        0.2,
        2.0,
        nodes=2,
        text=lambda run: {
            "node": lambda run, node: {"nic_limit_bytes_per_second": 12.5e9 / (10 if node == run.node(run.rank) else 1)}
        },
        begins=True,
    ),
    Scenario(
        "an NVLink is down",
        ("nvlink_narrow",),
        "rank",
        all_links,
        0.2,
        2.0,
        True,
        text=_gpu(gpu_nvlink_count=17),
        begins=True,
        ranks=(4, 8),
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
        "evaluation takes long",
        ("evaluation_cost",),
        "eval.every",
        quiet,
        seconds=500,
        step_s=(0.2, 0.4),
        text=lambda run: {"eval_share": 0.5 + 0.5 * run.size},
    ),
    Scenario("storage fails", ("storage_failing",), "rank", quiet, text=lambda run: {"event": _unsaved}),
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
        "a layer's gradient vanishes",
        ("layer_gradients",),
        "parameter",
        quiet,
        text=lambda run: {"sizes": _sizes, "goes": -1},
        step_s=(0.1, 0.5),
    ),
    Scenario(
        "a layer's gradient explodes",
        ("layer_gradients",),
        "parameter",
        quiet,
        text=lambda run: {"sizes": _sizes, "goes": 1},
        step_s=(0.1, 0.5),
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
    Scenario(
        "restarts",
        (),
        "",
        crowd=0.4,
        uneven=0.2,
        seconds=400,
        text=lambda run: {"restarts": run.rng.integers(20, 380, 8)},
    ),
    Scenario("long steps", (), "", step_s=(4.0, 12.0)),
    Scenario("histograms of a healthy model", (), "", text=lambda run: {"sizes": _sizes}, step_s=(0.1, 0.5)),
    Scenario(
        "InfiniBand in use",
        (),
        "",
        all_links,
        0.0,
        0.0,
        True,
        2,
        text=lambda run: {"node": lambda run, node: {"rdma_out_bytes": 40.0 * run.node_totals[node]["nic_out_bytes"]}},
    ),
    Scenario("a router that is not even", (), "", text=lambda run: {"loads": _loads}),
    Scenario("a long run", (), "", seconds=2700, step_s=(2.0, 4.0)),
]
