"""The speed of a job that nobody has trained yet, as `raydist plan` and `raydist sweep --dry-run` tell it.

Runs in: the user's shell. Imports torch and ray inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from raydist.errors import RaydistError, UsageError
from raydist.planner import estimate
from raydist.planner.facts import Machine
from raydist.planner.speed import NAMES, Device, find, refusal, speed
from raydist.planner.vocabulary import vocabulary
from raydist.registry import did_you_mean

if TYPE_CHECKING:
    from raydist.planner.facts import Model
    from raydist.report.sweep.forecast import Pace, Reckon
    from raydist.spec import JobSpec

NO_GPU = "it trains on CPUs"
_TYPE = "accelerator_type:"
_PER_NODE = 8
"""GPUs of a node, where nobody says it: as `raydist plan` has it."""


def named(gpu: str) -> Device:
    """The GPU that `--device` means. Raises UsageError."""
    if (found := find(gpu)) is None:
        raise UsageError(f"--device {gpu}: no GPU whose peak is known", did_you_mean(gpu, list(NAMES)))
    return found


def by_name(name: str | None) -> Device | str:
    """The GPU that the driver calls so, or why its speed is not known. None: there is none here."""
    if name is None:
        return "which GPU it will be is not known: see --device"
    return find(name) or f"the peak of a {name} is not known"


def add(
    told: dict[str, Any],
    job: JobSpec,
    machine: Machine,
    model: Model,
    device: Device | str,
    flops_per_token: Callable[[], float],
) -> None:
    """Adds `speed`, and that of each strategy, to what `raydist.cli.plan.tell` has told. `device`: or why there is no estimate."""
    rows = [row for row in told["strategies"] if row["refused"] is None]
    for row in rows:
        row["speed"] = None
    why = device if isinstance(device, str) else refusal(job, machine, device)
    told["speed"] = {"device": None, "because": why}
    if why is not None or isinstance(device, str):
        return
    each = flops_per_token()
    for row in rows:
        found = speed(row["strategy"], job, machine, model, device, each)
        row["speed"] = {
            "seconds": found.seconds,
            "tokens_per_second": found.tokens_per_second,
            "compute_seconds": found.compute,
            "communication_seconds": found.communication,
            "exposed_seconds": found.exposed,
            "offload_seconds": found.offload,
        }
    told["speed"] = {
        "device": device.name,
        "because": None,
        "flops_per_token": each,
        "peak_flops": device.fp32 if job.precision.params == "fp32" else device.half,
        "efficiency": device.efficiency,
        "node_bytes_per_second": device.node,
        "network_bytes_per_second": device.network,
        "host_bytes_per_second": device.host,
    }


def slowest(resources: Mapping[str, float]) -> Device | str:
    """`resources`: of a Ray cluster, among them `accelerator_type:H100`, which Ray finds by the driver's names."""
    names = [name.removeprefix(_TYPE) for name in resources if name.startswith(_TYPE)]
    found = [by_name(name) for name in names] or [f"the cluster has no {_TYPE}NAME among its resources: see --device"]
    return next(
        (one for one in found if isinstance(one, str)),
        min(found, key=lambda d: d.half if isinstance(d, Device) else 0.0),
    )


def of_host() -> Device | str:
    """That of the first GPU of this machine, or why it is not known."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            name = str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        name = None
    return by_name(name)


def reckon(gpu: str | None, cluster: Mapping[str, float] | None) -> Reckon | None:
    """For the GPU that was asked for, else the slowest of a cluster with these resources, else that of this machine, if any."""
    found = named(gpu) if gpu is not None else slowest(cluster) if cluster is not None else of_host()
    if isinstance(found, Device):
        return Reckoner(found)
    why = found if cluster is not None and cluster.get("GPU") else NO_GPU
    return None if cluster is None else lambda job: why


class Reckoner:
    """`reckoner(job)`: its tokens a second on that GPU, under its own strategy, or why nobody can tell."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._models: dict[str, tuple[Model, float]] = {}
        self._known: dict[str, float | str] = {}
        """By all that decides on it: of ten thousand cells few differ in more than a learning rate."""

    def __call__(self, job: JobSpec) -> Pace | str:
        """See `raydist.report.sweep.forecast.Reckon`."""
        from raydist.report.sweep.forecast import Pace, kind

        train = job.train.model_dump(mode="json", include={"global_batch", "micro_batch", "checkpoint_activations"})
        parts = (job.model, job.data, job.precision, job.cluster, job.parallel, job.offload)
        asked = " ".join([str(train), job.optim.name, *(part.model_dump_json() for part in parts)])
        if asked not in self._known:
            try:
                self._known[asked] = self._speed(job)
            except RaydistError as error:
                self._known[asked] = error.message
        found = self._known[asked]
        if isinstance(found, str):
            return found
        where = f"{self._device.name} at {self._device.efficiency:.0%} of its peak"
        return Pace(kind(job), found, where)

    def _speed(self, job: JobSpec) -> float | str:
        each, strategy = job.cluster.gpus_per_worker, job.parallel.strategy
        if each != "auto" and each < 1:
            return NO_GPU if not each else f"cluster.gpus_per_worker is {each:g}"
        if strategy not in estimate.STRATEGIES:
            return f"{strategy} is not built in"
        machine = Machine(job.cluster.most, _PER_NODE, "cuda")
        model, flops = self._model(job)
        why = estimate.refusal(strategy, job, machine, model) or refusal(job, machine, self._device)
        if why is not None:
            return why
        return speed(strategy, job, machine, model, self._device, flops).tokens_per_second

    def _model(self, job: JobSpec) -> tuple[Model, float]:
        from raydist.planner.measure import Planner

        vocab = vocabulary(job.data)
        asked = f"{vocab} {job.model.model_dump_json()}"
        if asked not in self._models:
            planner = Planner(job, vocab, "cuda")
            self._models[asked] = planner.model(), planner.flops_per_token()
        return self._models[asked]
