"""`raydist submit`: submits a job, a sweep or a script to a cluster through Ray's Jobs API.

Runs in: the user's shell. Imports ray inside the command; never torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raydist.cli import options


def submit(
    spec: Annotated[
        Path,
        typer.Argument(
            help="The job or the sweep, a YAML file, or a Python script as for `raydist run`; under the working directory.",
            show_default=False,
        ),
    ],
    address: Annotated[str, typer.Option(help="The cluster's Jobs API: http://HEAD:8265.", show_default=False)],
    arguments: options.Arguments = None,
    workers: options.Workers = None,
    cpus: options.Cpus = None,
    gpus: options.Gpus = None,
    overrides: options.Overrides = None,
    deepspeed: options.DeepSpeed = None,
    name: options.Name = None,
    storage: Annotated[str | None, typer.Option(help="Folder or URI that holds the runs, as the nodes see it.")] = None,
    until: options.Until = None,
    fresh: options.Fresh = False,
    faults: options.Faults = None,
    working_dir: Annotated[
        Path,
        typer.Option(
            help="The folder to upload to the cluster, without runs and without what .gitignore and .rayignore exclude."
        ),
    ] = Path(),
    retries: Annotated[
        int,
        typer.Option(
            min=0, help="Submit it again up to this many times if its driver dies or the cluster is unreachable."
        ),
    ] = 0,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Print the job's id and return.")] = False,
) -> None:
    """Submit a job, a sweep or a script to a cluster and follow its log. Exits with its exit code. Ctrl-C stops only the
    following."""
    from raydist.api import submitting

    job = submitting.submit.here(
        spec, address, arguments or [], workers=workers, cpus=cpus, gpus=gpus, set=overrides, deepspeed=deepspeed, name=name,
        storage=storage, until=until, fresh=fresh, faults=faults, working_dir=working_dir, retries=retries, wait=not no_wait,
    )  # fmt: skip
    if no_wait:
        print(job)
