"""The input of a run, the kind of its workers, and its ending.

Runs in: the driver. Neither torch nor ray.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raydist.cluster.run.fit import WorkerKind
from raydist.cluster.session import worker_environment
from raydist.errors import WorkerFailed
from raydist.faults import Fault
from raydist.observe.run_monitor import DEFAULT_EXPORTERS
from raydist.run.directory import RunDir
from raydist.spec import JobSpec


@dataclass(frozen=True, slots=True)
class Request:
    """One call of `raydist train` or `raydist run`, after all checks.

    `before(at)`: the seconds of each stage of the command until that Unix time; None: no user waited for them. `script`: the fields
    of raydist.launch.script.Script; None: the ranks run raydist's own loop.
    """

    spec: JobSpec
    run: RunDir
    dataset: str
    gpus: float
    until: int | None = None
    allow_spec_change: bool = False
    faults: Sequence[Fault] = ()
    exporters: Sequence[Mapping[str, Any]] = DEFAULT_EXPORTERS
    before: Callable[[float], Mapping[str, float]] | None = None
    script: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """How the run ended: a status of records.Status, its cause if it stopped, and the signal that interrupted it. `signal` None
    with status interrupted: there was no room for its workers. `step`: of the newest checkpoint, or of the run's end.
    """

    status: str
    step: int
    cause: str = ""
    traceback: str = ""
    signal: int | None = None


def worker_kind(spec: JobSpec, gpus: float) -> WorkerKind:
    """The kind of that job's workers. `gpus`: per worker."""
    return WorkerKind(spec.cluster.each(gpus), worker_env(spec), spec.cluster.resources)


def worker_env(spec: JobSpec) -> dict[str, str]:
    """The workers' environment: threads, the user's NCCL_, GLOO_, TORCH_ and CUDA_DEVICE_ variables, and the job's."""
    passed = {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "GLOO_", "TORCH_", "CUDA_DEVICE_"))}
    return {**worker_environment(max(1, int(spec.cluster.cpus_per_worker))), **passed, **spec.cluster.env}


def raise_if_stopped(ending: Ending, run: RunDir) -> None:
    """Raises WorkerFailed with the root cause of a run that stopped."""
    if ending.status == "stopped":
        left = f"with a checkpoint of step {ending.step}" if ending.step else "without a checkpoint"
        raise WorkerFailed(
            f"run {run.name} stopped {left}: {ending.cause}",
            f"all its events: raydist show {run.uri}; its logs: {run.uri}/logs",
        )
