"""`raydist doctor`: what is wrong with a run, or will be with a job: rank, cause, remedy, and why not another cause.

Runs in: the user's shell. Imports pyarrow and numpy inside the command; torch only for a job's memory; never ray.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raydist.cli import options

if TYPE_CHECKING:
    from raydist.diagnosis import Facts, Former
    from raydist.run.directory import RunDir
    from raydist.spec import JobSpec

_FILES = (".yaml", ".yml")


def is_job(target: str | None) -> bool:
    """Whether doctor's target is a job's file, not a run."""
    return target is not None and target.endswith(_FILES)


def doctor(
    target: Annotated[
        str | None,
        typer.Argument(help="A run folder's path or URI, a run's name, or a job's YAML file.", show_default=False),
    ] = None,
    storage: options.Storage = None,
    tree: Annotated[bool, typer.Option("--tree", help="Print the decision tree in words.")] = False,
    like: Annotated[
        str | None,
        typer.Option("--like", metavar="RUN", help="Of a job: a former run, for its noise scale and storage."),
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="Of a job: ranks that a node has room for; default: not known.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Of a job: memory of one device, such as 80GiB; checks whether it fits.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Of a job: override a field, such as optim.lr=3e-4."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what is wrong with a run, live or over: rank, cause, evidence, remedy; or what will be with a job, before it runs."""
    from raydist.diagnosis import rules, words_of_tree
    from raydist.errors import UsageError

    if tree:
        print(words_of_tree(rules()))
        return
    if target is None:
        raise UsageError("doctor: give a run or a job's file", "or --tree, for the decision tree")
    of_job = {"--like": like, "--gpus-per-node": gpus_per_node, "--memory": memory, "--set": overrides or None}
    if is_job(target):
        _before(target, storage, like, gpus_per_node, memory, overrides or [], as_json)
        return
    given = [name for name, value in of_job.items() if value is not None]
    if given:
        raise UsageError(f"{given[0]} is for a job's file, and {target} is a run", "leave it out")
    _run(target, storage, as_json)


def _run(target: str, storage: str | None, as_json: bool) -> None:
    from raydist.api.runs import Run
    from raydist.report import doctor as shown
    from raydist.run.directory import resolve
    from raydist.run.status import read_state

    run = Run(resolve(target, storage))
    status = read_state(run.folder)["status"]
    found = run.doctor()
    if as_json:
        print(json.dumps({"v": 1, "run": run.name, "path": run.uri, "status": status, **found}, allow_nan=False))
        return
    shown.show(f"{run.name} ({status})", found)


def _before(
    target: str,
    storage: str | None,
    like: str | None,
    per_node: int | None,
    memory: str | None,
    overrides: list[str],
    as_json: bool,
) -> None:
    from raydist.diagnosis import Facts, check_job
    from raydist.report import doctor as shown
    from raydist.run.directory import resolve
    from raydist.spec import load

    job = load(Path(target), overrides)
    former = _former(resolve(like, storage)) if like is not None else None
    looked = ["the job's mesh, batch, schedule, checkpoints, precision and environment variables"]
    blind = []
    if former is None:
        blind.append(
            "the batch against the noise scale, and the storage against the checkpoint interval: give --like RUN"
        )
    if per_node is None and job.cluster.most > 1:
        blind.append("the mesh over the nodes: give --gpus-per-node")
    facts = Facts(per_node=per_node, former=former)
    if memory is not None:
        facts = _memory(job, memory, per_node, facts)
        looked.append(f"its memory, by `raydist plan`, on devices of {memory}")
    else:
        blind.append("whether it fits: give --memory, such as 80GiB")
    found = [shown.plain_finding(one) for one in check_job(job, facts)]
    made: dict[str, Any] = {"findings": found, "looked": looked, "blind": blind}
    if as_json:
        print(json.dumps({"v": 1, "spec": target, **made}, allow_nan=False))
        return
    shown.show(f"{target}, before it runs", made)


def _former(run: RunDir) -> Former:
    """What that run measured."""
    import statistics

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
    from dataclasses import replace

    from raydist.api.fitting import fitting
    from raydist.api.planning import parse_size, target
    from raydist.planner.facts import Machine

    device, _ = target(job, asked=True, here=False)
    machine = Machine(job.cluster.most, per_node or 8, device, parse_size(memory))
    needed, pick = fitting(job, machine)
    changes = ", ".join(f"{name}: {value}" for name, value in (pick.changes if pick else {}).items())
    gain = f"set {changes}, which needs {pick.estimate.total / 2**30:.1f} GiB" if pick and changes else ""
    return replace(facts, needed=needed, usable=machine.usable, pick=gain)
