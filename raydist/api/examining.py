"""What `raydist doctor JOB.yaml` does: what will be wrong with a job, before it runs.

Runs in: the process of the command, or one of its own. Imports pyarrow and numpy inside functions, and torch for a job's memory;
never ray.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raydist.api.call import check_numbers, separate

if TYPE_CHECKING:
    from raydist.diagnosis import Facts, Former
    from raydist.run.directory import RunDir
    from raydist.spec import JobSpec
    from raydist.spec.load import Job, Overrides


@separate
def doctor(
    spec: Job,
    *,
    set: Overrides | None = None,
    storage: str | None = None,
    like: str | None = None,
    gpus_per_node: int | None = None,
    memory: str | None = None,
) -> dict[str, Any]:
    """What will be wrong with a job, as `raydist doctor JOB.yaml --json` prints it: findings, looked, blind. Of a run:
    `Run.doctor`.

    `spec` and `set` are as for `train`. `like`: a former run, in `storage`, for its noise scale and its storage; `gpus_per_node`:
    ranks that a node has room for; `memory`: of one device, such as "80GiB", to check whether it fits. Raises UserErrors.
    """
    check_numbers(gpus_per_node=(gpus_per_node, 1))
    from raydist.diagnosis import Facts, check_job
    from raydist.report.doctor import plain_finding
    from raydist.run.directory import resolve
    from raydist.spec import load

    job = load(spec, set or ())
    former = _former(resolve(like, storage)) if like is not None else None
    looked = ["the job's mesh, batch, schedule, checkpoints, precision and environment variables"]
    blind = []
    if former is None:
        blind.append(
            "the batch against the noise scale, and the storage against the checkpoint interval: give --like RUN"
        )
    if gpus_per_node is None and job.cluster.most > 1:
        blind.append("the mesh over the nodes: give --gpus-per-node")
    facts = Facts(per_node=gpus_per_node, former=former)
    if memory is not None:
        facts = _memory(job, memory, gpus_per_node, facts)
        looked.append(f"its memory, by `raydist plan`, on devices of {memory}")
    else:
        blind.append("whether it fits: give --memory, such as 80GiB")
    return {"findings": [plain_finding(one) for one in check_job(job, facts)], "looked": looked, "blind": blind}


def _former(run: RunDir) -> Former:
    """What that run measured."""
    from raydist.diagnosis import Former
    from raydist.run.log import read_events, read_steps

    rows = read_steps(run, ("grad_noise_scale", "seconds"))
    scales = [value for value in rows["grad_noise_scale"].to_pylist() if value is not None]
    seconds = rows["seconds"].to_pylist()[1:]
    saved = [event.data for event in read_events(run) if event.kind == "checkpoint_saved"][1:]
    return Former(
        run.name,
        noise_scale=scales[-1] if scales else None,
        step_s=statistics.median(seconds) if seconds else None,
        save_s=statistics.median(e["seconds"] for e in saved) if saved else None,
        stall_s=statistics.median(e["stall_seconds"] for e in saved) if saved else None,
    )


def _memory(job: JobSpec, memory: str, per_node: int | None, facts: Facts) -> Facts:
    """With the planner's estimate of the job's own strategy, and what it would set."""
    from raydist.api.fitting import fitting
    from raydist.api.planning import parse_size, target
    from raydist.planner.facts import Machine

    device, _ = target(job, asked=True, here=False)
    machine = Machine(job.cluster.most, per_node or 8, device, parse_size(memory))
    needed, pick = fitting(job, machine)
    changes = ", ".join(f"{name}: {value}" for name, value in (pick.changes if pick else {}).items())
    gain = f"set {changes}, which needs {pick.estimate.total / 2**30:.1f} GiB" if pick and changes else ""
    return replace(facts, needed=needed, usable=machine.usable, pick=gain)
