"""`raydist plan --scaling`: a job's forecast on 8 to 1,024 GPUs, and how far apart a plan's checkpoints are, as plain values.

Runs in: the process of the command, or one of its own. Imports torch inside functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from raydist.api import speed
from raydist.checkpoint.interval import apart, young_daly
from raydist.errors import UsageError
from raydist.planner import estimate, shares
from raydist.planner.facts import Machine
from raydist.planner.scaling import GPUS, Assumed, Measured, Save, forecast
from raydist.planner.speed import Device, Speed, refusal
from raydist.planner.speed import speed as estimated
from raydist.worker.checkpoint.snapshot_interval import SHARE, steps_apart

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
    measured: Measured | None,
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
    flops = planner.flops_per_token()

    def step(asked: JobSpec, here: Machine) -> Speed:
        passes = estimate.measured(strategy, asked, here, model, planner.sends)
        return estimated(strategy, asked, here, model, device, flops, passes)

    points, refused = forecast(job, machine, step, _saves(job, model, device.host, measured), assumed, weak=weak)
    return {
        "v": 1,
        "spec": source,
        "strategy": strategy,
        "weak": weak,
        "assumed": asdict(assumed),
        "measured": measured and asdict(measured),
        "speed": speed.assumptions(job, device, flops),
        "points": [asdict(point) for point in points],
        "refused": {str(gpus): reason for gpus, reason in refused.items()},
    }


def intervals(
    plan: Mapping[str, Any],
    job: JobSpec,
    machine: Machine,
    model: Model,
    device: Device | str,
    mtbf_h: float,
    measured: Measured | None,
) -> dict[str, Any] | None:
    """How far apart checkpoints and copies in memory are with `auto`, as `--json` prints it; None if the time of a step or what a
    checkpoint costs is not known. `plan`: with the speed of each strategy."""
    named = plan["pick"]["strategy"] if plan["pick"] and not plan["pick"]["set"] else job.parallel.strategy
    speeds = {row["strategy"]: row["speed"]["seconds"] for row in plan["strategies"] if row.get("speed")}
    own = measured is not None and measured.ranks == machine.ranks
    step_s = measured.step_s if measured is not None and own else speeds.get(named)
    link = None if isinstance(device, str) else device.host
    if step_s is None or (link is None and (measured is None or measured.save is None)):
        return None
    save, mtbf_s = _saves(job, model, link, measured)(machine), mtbf_h * 3600 / machine.ranks
    seconds = apart(save.stall_s, save.write_s, mtbf_s)
    copy_s = measured.copy_s if measured is not None and own and measured.copy_s is not None else save.stall_s
    return {
        "run": measured and measured.run,
        "mtbf_s": mtbf_s,
        "step_s": step_s,
        "stall_s": save.stall_s,
        "write_s": save.write_s,
        "checkpoint_s": seconds,
        "checkpoint_steps": max(1, math.ceil(seconds / step_s)),
        "copy_cost_s": copy_s,
        "copy_share": SHARE,
        "copy_steps": (copies := steps_apart(copy_s, step_s)),
        "copy_s": copies * step_s,
        "copy_loses_least_s": young_daly(copy_s, mtbf_s),
    }


def _saves(job: JobSpec, model: Model, link: float | None, measured: Measured | None) -> Callable[[Machine], Save]:
    """What a checkpoint costs: in proportion to the bytes of a rank what it cost the run that measured it, else the copy to the
    host over `link`, and the write at `cluster.resources.storage_mb_s`."""

    def of_rank(here: Machine) -> float:
        return _STATE_BYTES * model.most_trained(job.parallel.pipeline) / shares.replicas(job, here)

    def save(here: Machine) -> Save:
        if measured is not None and measured.save is not None:
            ratio = of_rank(here) / of_rank(replace(here, ranks=measured.ranks))
            return Save(measured.save.stall_s * ratio, measured.save.write_s * ratio)
        assert link is not None
        storage = job.cluster.resources.storage_mb_s
        size = of_rank(here)
        return Save(size / link, size * min(here.per_node, here.ranks) / (storage * 1e6) if storage else 0.0)

    return save
