"""The faults of benchmarks/doctor.py and its healthy runs, with the right answers. What a fault does: doctor_effects.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from doctor_effects import (
    all_data,
    all_links,
    busier,
    by_heart,
    collecting,
    diverge,
    hang,
    in_blocks,
    link,
    loader,
    loads,
    nan,
    overfit,
    overflow,
    quiet,
    retries,
    sizes,
    small,
    spike,
    standstill,
    stolen,
    stopped,
    swapping,
    throttled,
    unsaved,
    waiting,
)
from doctor_run import Hook, Run


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


def _often(run: Run) -> dict[str, Any]:
    run.every = int(run.rng.integers(3, 8))
    return {"eval_share": 0.1}


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
    Scenario(
        "memory that corrects errors",
        ("gpu_ecc_retries",),
        "rank",
        waiting,
        0.4,
        1.5,
        True,
        text=lambda run: {
            "ecc": lambda run, rank: 10.0 ** (0.5 + 2 * run.size) if run.on and rank == run.rank else 0.0
        },
    ),
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
    Scenario("storage fails", ("storage_failing",), "rank", quiet, text=lambda run: {"event": unsaved}),
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
    Scenario("poisoned batch", ("bad_batch",), "step", quiet, 0.1, 1.0, loss=spike, step_s=(0.1, 0.6)),
    Scenario("learning rate too high", ("lr_too_high",), "optim.lr", quiet, 0.2, 1.5, loss=diverge, step_s=(0.1, 0.6)),
    Scenario(
        "loss scale collapses", ("loss_scale",), "precision.params", quiet, 0.1, 1.0, loss=overflow, step_s=(0.1, 0.6)
    ),
    Scenario("not finite, from calm", ("bad_batch",), "step", quiet, text=lambda run: {"event": nan}),
    Scenario(
        "not finite, after growth",
        ("lr_too_high",),
        "optim.lr",
        quiet,
        loss=lambda run, loss, norm: (loss, norm * 1.08 ** min(run.step - run.text.setdefault("hit", run.step), 40)),
        step_s=(0.1, 0.4),
        text=lambda run: {"event": lambda run: nan(run) if run.step - run.text.get("hit", run.step) > 45 else None},
    ),
    *(
        Scenario(
            f"a layer's {of} {does}",
            (rule,),
            "parameter",
            quiet,
            text=lambda run, key=key, way=way: {"sizes": sizes, key: way},
            step_s=(0.1, 0.5),
        )
        for of, rule, key in (("gradient", "layer_gradients", "goes"), ("output", "layer_activations", "puts_out"))
        for does, way in (("vanishes", -1), ("explodes", 1))
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
        text=lambda run: {"eval": overfit},
    ),
    Scenario(
        "tokens are repeated too often",
        ("repeated_tokens",),
        "train.steps",
        quiet,
        seconds=700,
        step_s=(0.1, 0.3),
        loss=by_heart,
        text=lambda run: {"eval": standstill, "steps_per_epoch": 3 * run.every},
    ),
    Scenario(
        "dead experts",
        ("dead_experts",),
        "parameter",
        quiet,
        text=lambda run: {"loads": loads, "kills": True},
        step_s=(0.1, 0.5),
    ),
    Scenario(
        "expert imbalance",
        ("expert_imbalance",),
        "parameter",
        quiet,
        text=lambda run: {"loads": loads, "prefers": True},
        step_s=(0.1, 0.5),
    ),
    Scenario("asymmetric collectives", ("stopped",), "rank", quiet, text=lambda run: {"event": hang}),
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
    Scenario("histograms of a healthy model", (), "", text=lambda run: {"sizes": sizes}, step_s=(0.1, 0.5)),
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
    Scenario("data in blocks", (), "", quiet, 0.5, 1.5, loss=in_blocks, step_s=(0.1, 0.3)),
    Scenario(
        "evaluations and checkpoints every few steps",
        (),
        "",
        seconds=300,
        step_s=(0.1, 0.4),
        text=_often,
    ),
    Scenario("a router that is not even", (), "", text=lambda run: {"loads": loads}),
    Scenario(
        "errors that memory corrects now and then",
        (),
        "",
        crowd=0.6,
        gpus=True,
        text=lambda run: {"ecc": lambda run, rank: 0.02 if rank == 0 else 0.0},
    ),
    Scenario("a long run", (), "", seconds=2700, step_s=(2.0, 4.0)),
]
