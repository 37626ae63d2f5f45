"""Estimated speed of a job before it is trained, for `raydist plan` and `raydist sweep --dry-run`.

Runs in: the process of the command, or one of its own. Imports torch and ray inside functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from raydist.errors import RaydistError, UsageError
from raydist.planner import estimate, shares
from raydist.planner.facts import Machine
from raydist.planner.speed import NAMES, Device, Speed, find, refusal, speed
from raydist.planner.vocabulary import vocabulary
from raydist.registry import did_you_mean

if TYPE_CHECKING:
    from raydist.planner.facts import Activations, Model
    from raydist.planner.measure import Planner
    from raydist.report.sweep.forecast import EstimateSpeed, Pace
    from raydist.spec import JobSpec

NO_GPU = "it trains on CPUs"
_TYPE = "accelerator_type:"
_PER_NODE = 8
"""GPUs per node if none are given: the default of `raydist plan`."""


def named(gpu: str) -> Device:
    """The GPU for the value of `--device`. Raises UsageError."""
    if (device := find(gpu)) is None:
        raise UsageError(f"--device {gpu}: no GPU with a known peak", did_you_mean(gpu, list(NAMES)))
    return device


def by_name(name: str | None) -> Device | str:
    """The GPU with this name from the driver, or why its speed is not known. None: this machine has no GPU."""
    if name is None:
        return "the GPU model is not known: see --device"
    return find(name) or f"the peak of a {name} is not known"


def add(
    plan: dict[str, Any],
    job: JobSpec,
    machine: Machine,
    model: Model,
    device: Device | str,
    planner: Planner,
) -> None:
    """Adds `speed`, for the job and for each strategy, to a result of `raydist.api.planning.tell`.

    `device`: the GPU, or the reason why there is no estimate.
    """
    rows = [row for row in plan["strategies"] if row["refused"] is None]
    for row in rows:
        row["speed"] = None
    why = device if isinstance(device, str) else refusal(job, machine, device)
    plan["speed"] = {"device": None, "because": why}
    if why is not None or isinstance(device, str):
        return
    each = planner.flops_per_token()
    for row in rows:
        passes = estimate.measured(row["strategy"], job, machine, model, planner.measure)
        estimated = speed(row["strategy"], job, machine, model, device, each, passes)
        row["speed"] = plain(estimated, bool(model.stages))
    plan["speed"] = assumptions(job, device, each)


def plain(found: Speed, pipeline: bool = True) -> dict[str, float]:
    """The forecast of one strategy, as --json prints it. `pipeline`: also what ranks of a pipeline wait."""
    return {
        "seconds": found.seconds,
        "tokens_per_second": found.tokens_per_second,
        "compute_seconds": found.compute,
        "communication_seconds": found.communication,
        "exposed_seconds": found.exposed,
        "offload_seconds": found.offload,
        **({"waits_seconds": found.waits, "bubble": found.bubble} if pipeline else {}),
    }


def assumptions(job: JobSpec, device: Device, flops_per_token: float) -> dict[str, Any]:
    """What the forecasts are based on, as --json prints it."""
    return {
        "device": device.name,
        "because": None,
        "flops_per_token": flops_per_token,
        "peak_flops": device.fp32 if job.precision.params == "fp32" else device.half,
        "efficiency": device.efficiency,
        "node_bytes_per_second": device.node,
        "network_bytes_per_second": device.network,
        "host_bytes_per_second": device.host,
    }


def slowest(resources: Mapping[str, float]) -> Device | str:
    """The slowest GPU of a Ray cluster, or why it is not known.

    `resources` has an entry such as `accelerator_type:H100`, which Ray derives from the driver's name of the GPU.
    """
    names = [name.removeprefix(_TYPE) for name in resources if name.startswith(_TYPE)]
    devices = [by_name(name) for name in names] or [f"the cluster has no {_TYPE}NAME among its resources: see --device"]
    return next(
        (one for one in devices if isinstance(one, str)),
        min(devices, key=lambda d: d.half if isinstance(d, Device) else 0.0),
    )


def of_host() -> Device | str:
    """The first GPU of this machine, or why its speed is not known."""
    from raydist.cluster.node_facts import host_gpus

    return by_name(next(iter(host_gpus()[0]), None))


def estimate_speed(gpu: str | None, cluster: Mapping[str, float] | None) -> EstimateSpeed | None:
    """A speed estimate for `gpu`, else the slowest GPU of a cluster with these resources, else this machine's GPU, if any."""
    device = named(gpu) if gpu is not None else slowest(cluster) if cluster is not None else of_host()
    if isinstance(device, Device):
        return SpeedEstimator(device)
    why = device if cluster is not None and cluster.get("GPU") else NO_GPU
    return None if cluster is None else lambda job: why


class SpeedEstimator:
    """`estimator(job)`: the job's estimated tokens/s on this GPU, under its own strategy, or why there is no estimate."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._models: dict[str, tuple[Model, float]] = {}
        self._known: dict[str, float | str] = {}
        """Results by the fields that affect speed: most cells of a sweep differ only in others, such as the learning rate."""

    def __call__(self, job: JobSpec) -> Pace | str:
        """See `raydist.report.sweep.forecast.EstimateSpeed`."""
        from raydist.report.sweep.forecast import Pace, kind

        train = job.train.model_dump(mode="json", include={"global_batch", "micro_batch", "checkpoint_activations"})
        parts = (job.model, job.data, job.precision, job.cluster, job.parallel, job.offload)
        key = " ".join([str(train), job.optim.name, *(part.model_dump_json() for part in parts)])
        if key not in self._known:
            try:
                self._known[key] = self._speed(job)
            except RaydistError as error:
                self._known[key] = error.message
        rate = self._known[key]
        if isinstance(rate, str):
            return rate
        where = f"{self._device.name} at {self._device.efficiency:.0%} of its peak"
        return Pace(kind(job), rate, where)

    def _speed(self, job: JobSpec) -> float | str:
        each, strategy = job.cluster.gpus_per_worker, job.parallel.strategy
        if each != "auto" and each < 1:
            return NO_GPU if not each else f"cluster.gpus_per_worker is {each:g}"
        if strategy not in shares.planned(job):
            return f"{strategy} has no PLAN"
        machine = Machine(job.cluster.most, _PER_NODE, "cuda")
        model, flops = self._model(job)
        why = estimate.refusal(strategy, job, machine, model) or refusal(job, machine, self._device)
        if why is not None:
            return why
        passes: tuple[Activations, ...] = ()
        if job.parallel.replica > 1:  # ranks of a replica send what a pass says
            from raydist.planner.measure import Planner

            sends = Planner(job, vocabulary(job.data), "cuda").sends
            passes = estimate.measured(strategy, job, machine, model, sends)
        return speed(strategy, job, machine, model, self._device, flops, passes).tokens_per_second

    def _model(self, job: JobSpec) -> tuple[Model, float]:
        from raydist.planner.measure import Planner

        vocab = vocabulary(job.data)
        of = job.parallel
        mesh = of.tensor, of.context, of.pipeline, of.chunks, of.pipeline_cut
        key = f"{vocab} {mesh} {job.model.model_dump_json()}"
        if key not in self._models:
            planner = Planner(job, vocab, "cuda")
            self._models[key] = planner.model(), planner.flops_per_token()
        return self._models[key]
