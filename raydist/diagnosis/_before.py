"""What will go wrong with a job before it runs: `raydist doctor SPEC`. Pure; the command collects the facts.

Runs anywhere: plain python.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from raydist.diagnosis._symptoms import figure
from raydist.records import NOISE_FAR_BEYOND, Finding, Severity
from raydist.spec import JobSpec

EPOCHS = 4.0
"""Up to four passes over the same tokens are nearly as good as new ones (Muennighoff et al. 2023, arXiv 2305.16264)."""
MICRO_BATCHES = 4
HEADROOM = 0.9
"""Share of the usable memory above which a longer batch, or another library's buffer, may not fit."""
STALL = 0.05

VARIABLES: dict[str, tuple[tuple[str, ...], str]] = {
    "NCCL_P2P_DISABLE": (("1",), "GPUs of one node then send through host memory, not over NVLink or PCIe"),
    "NCCL_SHM_DISABLE": (("1",), "ranks of one node then send through the network interface"),
    "NCCL_IB_DISABLE": (("1",), "nodes then use sockets, although they may have InfiniBand or RoCE"),
    "NCCL_NET": (("Socket", "socket"), "nodes then use sockets, although they may have InfiniBand or RoCE"),
    "NCCL_NVLS_ENABLE": (("0",), "NVLink switches then do not add up (SHARP)"),
    "NCCL_SOCKET_IFNAME": (("lo", "=lo"), "ranks of other nodes cannot be reached over the loopback"),
    "GLOO_SOCKET_IFNAME": (("lo",), "ranks of other nodes cannot be reached over the loopback"),
    "NCCL_DEBUG": (("TRACE",), "each collective then writes lines to the log"),
    "NCCL_LAUNCH_MODE": (("GROUP",), "launches of one process then wait for one another"),
    "CUDA_LAUNCH_BLOCKING": (("1",), "each kernel then waits for the one before: it is for finding errors"),
    "TORCH_NCCL_BLOCKING_WAIT": (("1",), "the host then waits for each collective, which is not overlapped"),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "each collective is then checked by another one first"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (("1",), "each tensor then calls cudaMalloc, which waits for the device"),
}
"""Environment variables -> (values that cost speed, why). NVIDIA, "NCCL Environment Variables"; PyTorch, "CUDA semantics"."""


@dataclass(frozen=True, slots=True)
class Former:
    """What a former run of a like job measured; None: not known."""

    name: str
    noise_scale: float | None = None
    step_s: float | None = None
    save_s: float | None = None
    stall_s: float | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What the command knows besides the job. `needed`, `usable`: bytes of the fullest device, by the planner; `pick`: settings
    that fit, as text."""

    per_node: int | None = None
    former: Former | None = None
    needed: int | None = None
    usable: int | None = None
    pick: str = ""
    looked: list[str] = field(default_factory=list)


def check_job(job: JobSpec, facts: Facts) -> list[Finding]:
    """All findings, the worst first."""
    order = ("critical", "warning", "info")
    found = [
        *_mesh(job, facts),
        *_batch(job, facts),
        *_memory(job, facts),
        *_storage(job, facts),
        *_variables(job),
        *_training(job),
    ]
    return sorted(found, key=lambda one: order.index(one.severity))


def _finding(
    rule: str, severity: Severity, setting: str, what: str, cause: str, remedy: str, **figures: Any
) -> Finding:
    evidence = [figure(name, float(value), "the job, or a former run") for name, value in figures.items()]
    return Finding(
        rule, None, severity, what, figures, remedy, cause=cause, culprit={"setting": setting}, evidence=evidence
    )


def _mesh(job: JobSpec, facts: Facts) -> Iterator[Finding]:
    parallel, each = job.parallel, facts.per_node
    if each is not None and job.cluster.most > each:
        inner = parallel.tensor * parallel.context
        if parallel.tensor > 1 and each % parallel.tensor:
            yield _finding(
                "mesh_over_nodes", "warning" if parallel.tensor_across_nodes else "critical", "parallel.tensor",
                f"groups of {parallel.tensor} tensor parallel ranks do not fit nodes of {each}: a group lies on two nodes",
                "each layer waits for the network between them", f"set parallel.tensor to a divisor of {each}",
                tensor=parallel.tensor, ranks_of_a_node=each,
            )  # fmt: skip
        elif parallel.context > 1 and each % inner:
            yield _finding(
                "mesh_over_nodes", "warning", "parallel.context",
                f"groups of {inner} tensor and context parallel ranks do not fit nodes of {each}",
                "attention exchanges heads between nodes in each layer", f"let tensor x context divide {each}",
                tensor_times_context=inner, ranks_of_a_node=each,
            )  # fmt: skip
        if parallel.expert > each:
            yield _finding(
                "mesh_over_nodes", "info", "parallel.expert",
                f"the experts of a layer are on {parallel.expert} ranks, which are several nodes of {each}",
                "tokens cross the network in each layer", f"set parallel.expert: {each} or less, if the experts then fit",
                expert=parallel.expert, ranks_of_a_node=each,
            )  # fmt: skip
    if parallel.pipeline > 1 and job.data.batching is None:
        replicas = max(job.cluster.most // parallel.replica, 1)
        micro = max(job.train.global_batch // replicas // max(job.train.micro_batch or 1, 1), 1)
        if micro < MICRO_BATCHES * parallel.pipeline:
            bubble = (parallel.pipeline - 1) / (micro * parallel.chunks + parallel.pipeline - 1)
            yield _finding(
                "pipeline_bubble", "info", "train.micro_batch",
                f"{micro} micro-batches for a pipeline of {parallel.pipeline} ranks: "
                f"they wait about {bubble:.0%} of the passes' time",
                "the pipeline fills and empties in each step",
                "lower train.micro_batch, raise train.global_batch, or set parallel.chunks", micro_batches=micro, bubble=bubble,
            )  # fmt: skip


def _batch(job: JobSpec, facts: Facts) -> Iterator[Finding]:
    former = facts.former
    if former is not None and former.noise_scale is not None:
        scale = max(former.noise_scale, 1.0)
        times = job.train.global_batch / scale
        if times > NOISE_FAR_BEYOND:
            yield _finding(
                "grad_noise", "info", "train.global_batch",
                f"the global batch of {job.train.global_batch} is {times:.1f} times the noise scale that "
                f"{former.name} had at its end",
                "the direction of a step is known from far fewer sequences",
                f"lower train.global_batch to about {1 << max(0, int(scale) - 1).bit_length()} (docs/explanation/noise.md)",
                global_batch=job.train.global_batch, grad_noise_scale=scale,
            )  # fmt: skip
    if job.train.epochs is not None and job.train.epochs > EPOCHS:
        yield _finding(
            "repeated_tokens", "info", "train.epochs",
            f"each token is trained {job.train.epochs:g} times; from the fifth on a repeated token is worth less than a new one",
            "the data is small for the length of the run", "use more data, or at most four epochs", epochs=job.train.epochs,
        )  # fmt: skip


def _memory(job: JobSpec, facts: Facts) -> Iterator[Finding]:
    if facts.needed is None or facts.usable is None or facts.needed <= HEADROOM * facts.usable:
        return
    fits = facts.needed <= facts.usable
    sizes = f"{facts.needed / 2**30:.1f} of {facts.usable / 2**30:.1f} GiB"
    yield _finding(
        "memory_headroom", "warning" if fits else "critical", "train.micro_batch",
        f"the fullest device needs {sizes}" + ("" if fits else ": it does not fit"),
        "parameters, optimizer state and activations",
        facts.pick or "lower train.micro_batch, or use parallel.strategy: zero2 or zero3",
        needed_bytes=facts.needed, usable_bytes=facts.usable,
    )  # fmt: skip


def _storage(job: JobSpec, facts: Facts) -> Iterator[Finding]:
    every, former = job.checkpoint.every, facts.former
    if every is None:
        yield _finding(
            "checkpoint_cost", "warning", "checkpoint.every", "there is no checkpoint before the end",
            "after a failure of all copies in memory the run starts from the beginning", "set checkpoint.every",
        )  # fmt: skip
    elif every != "auto" and former is not None and former.step_s and former.save_s is not None:
        gap = every * former.step_s
        stall = (former.stall_s or 0.0) / gap
        if former.save_s > gap or stall > STALL:
            need = int(max(1.5 * former.save_s, (former.stall_s or 0.0) / (STALL / 2)) / former.step_s) + 1
            yield _finding(
                "checkpoint_cost", "warning", "checkpoint.every",
                f"a checkpoint every {every} steps is one every {gap:.1f} s, and {former.name} took {former.save_s:.1f} s to "
                "write one, "
                f"of which training waited {former.stall_s or 0.0:.1f} s",
                "the storage is too slow for that interval", f"set checkpoint.every: {need}",
                interval_seconds=gap, write_seconds=former.save_s,
            )  # fmt: skip


def _variables(job: JobSpec) -> Iterator[Finding]:
    for name, value in job.cluster.env.items():
        values, why = VARIABLES.get(name, ((), ""))
        if value in values:
            yield _finding(
                "environment", "warning", f"cluster.env.{name}", f"cluster.env sets {name}={value}: {why}",
                "the variable switches off what the nodes may have", f"remove {name} from cluster.env",
            )  # fmt: skip
    threads = job.cluster.env.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > job.cluster.cpus_per_worker:
        yield _finding(
            "environment", "warning", "cluster.env.OMP_NUM_THREADS",
            f"OMP_NUM_THREADS={threads} is more than cluster.cpus_per_worker: {job.cluster.cpus_per_worker:g}",
            "threads of several ranks share a processor", f"raise cluster.cpus_per_worker to {threads}, or remove the variable",
            threads=int(threads),
        )  # fmt: skip


def _training(job: JobSpec) -> Iterator[Finding]:
    if job.optim.schedule.warmup == 0 and job.optim.name != "sgd":
        yield _finding(
            "no_warmup", "warning", "optim.schedule.warmup",
            f"{job.optim.name} starts with its full learning rate, {job.optim.lr:g}",
            "the first updates divide by second moments of very few gradients", "set optim.schedule.warmup: 0.02", lr=job.optim.lr,
        )  # fmt: skip
    if job.precision.params == "fp16":
        yield _finding(
            "loss_scale", "info", "precision.params", "fp16 overflows above 65,504",
            "its range is small, so the loss is scaled", "set precision.params: bf16, if the devices have it",
        )  # fmt: skip
    if job.observe.interval_s is None:
        yield _finding(
            "no_telemetry", "info", "observe.interval_s", "no telemetry: `raydist doctor` can then judge only steps and events",
            "observe.interval_s is null", "set observe.interval_s: 1",
        )  # fmt: skip
