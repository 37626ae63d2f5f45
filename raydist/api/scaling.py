"""`raydist plan --scaling`: a job's forecast on 8 to 1,024 GPUs, as plain values.

Runs in: the process of the command, or one of its own. Imports torch inside functions.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from raydist.api import speed
from raydist.errors import UsageError
from raydist.planner import estimate, shares
from raydist.planner.facts import Machine
from raydist.planner.scaling import GPUS, Assumed, Save, forecast
from raydist.planner.speed import Device, Speed, refusal
from raydist.planner.speed import speed as estimated

if TYPE_CHECKING:
    from raydist.planner.facts import Model
    from raydist.planner.measure import Planner
    from raydist.spec import JobSpec

_STATE_BYTES = 12
"""Of a parameter: its value and AdamW's two moments, in fp32."""


def scaled(
    source: str,
    job: JobSpec,
    machine: Machine,
    model: Model,
    device: Device | str,
    planner: Planner,
    assumed: Assumed,
    *,
    weak: bool,
) -> dict[str, Any]:
    """The forecast of the job's own strategy, as `--json` prints it; docs/how-to/plan.md lists the keys. Raises UsageError where
    there is no forecast."""
    strategy, largest = job.parallel.strategy, Machine(GPUS[-1], machine.per_node, machine.device, machine.memory)
    why = device if isinstance(device, str) else refusal(job, largest, device)
    if why is None and strategy not in shares.planned(job):
        why = f"the strategy {strategy} has no PLAN"
    if why is not None or isinstance(device, str):
        raise UsageError(f"--scaling forecasts the speed: {why}", "name a GPU, such as --device h100")
    link, flops = device.host, planner.flops_per_token()

    def step(asked: JobSpec, here: Machine) -> Speed:
        passes = estimate.measured(strategy, asked, here, model, planner.measure)
        return estimated(strategy, asked, here, model, device, flops, passes)

    def save(here: Machine) -> Save:
        of_rank = _STATE_BYTES * model.most_trained(job.parallel.pipeline) / shares.replicas(job, here)
        storage = job.cluster.resources.storage_mb_s
        return Save(of_rank / link, of_rank * min(here.per_node, here.ranks) / (storage * 1e6) if storage else 0.0)

    points, refused = forecast(job, machine, step, save, assumed, weak=weak)
    return {
        "v": 1,
        "spec": source,
        "strategy": strategy,
        "weak": weak,
        "assumed": asdict(assumed),
        "speed": speed.assumptions(job, device, flops),
        "points": [asdict(point) for point in points],
        "refused": {str(gpus): reason for gpus, reason in refused.items()},
    }
