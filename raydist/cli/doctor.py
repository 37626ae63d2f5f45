"""`raydist doctor`: what is wrong with a run, or will be with a job: rank, cause, remedy, and why not another cause.

Runs in: the user's shell. Imports pyarrow and numpy inside the command; torch only for a job's memory; never ray.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from raydist.cli import options

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
        from raydist.api.examining import doctor as examine
        from raydist.report import doctor as shown

        made = examine.here(
            Path(target), set=overrides, storage=storage, like=like, gpus_per_node=gpus_per_node, memory=memory
        )
        if as_json:
            print(json.dumps({"v": 1, "spec": target, **made}, allow_nan=False))
            return
        shown.show(f"{target}, before it runs", made)
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
