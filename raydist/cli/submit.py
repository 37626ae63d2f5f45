"""`raydist submit`: a job or anything else `raydist train` takes, on a cluster, through Ray's Jobs API.

Runs in: the user's shell. Imports ray inside the command; never torch.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from raydist.errors import UserError, WorkerFailed


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(submit)


def submit(
    spec: Annotated[Path, typer.Argument(help="The job: a YAML file under the working directory.", show_default=False)],
    address: Annotated[str, typer.Option(help="The cluster's Jobs API: http://HOST:8265.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Override a field, such as optim.lr=3e-4.")
    ] = None,
    deepspeed: Annotated[
        Path | None,
        typer.Option(help="A DeepSpeed JSON file; it beats the job's own fields, but not --set.", show_default=False),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run. The same name and storage resume it.")] = None,
    storage: Annotated[str | None, typer.Option(help="Folder or URI that holds the runs, as the nodes see it.")] = None,
    until: Annotated[int | None, typer.Option(min=1, help="End after this step, with a checkpoint, as paused.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete what is there of that name, and start anew.")] = False,
    faults: Annotated[
        Path | None, typer.Option(help="A YAML list of what is to go wrong on the way: see `raydist faults`.")
    ] = None,
    working_dir: Annotated[Path, typer.Option(help="The folder that is shipped to the cluster.")] = Path(),
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Print the job's id and return.")] = False,
) -> None:
    """Submit a job to a cluster, and follow its log. Ends with the job's exit code."""
    root = working_dir.resolve()
    inside = _inside(spec, root)
    from raydist.spec import load

    job = load(
        spec, overrides or [], deepspeed
    )  # what is wrong with it is said here and now, not minutes later in a log
    if faults is not None:
        from raydist.faults import load as load_faults

        load_faults(faults, job)
    words = ["python", "-m", "raydist", "train", str(inside)]
    for text in overrides or []:
        words += ["--set", text]
    config = None if deepspeed is None else _inside(deepspeed, root)
    injected = None if faults is None else _inside(faults, root)
    options = {"--deepspeed": config, "--name": name, "--storage": storage, "--until": until, "--faults": injected}
    for option, value in options.items():
        if value is not None:
            words += [option, str(value)]
    if fresh:
        words.append("--fresh")
    _submit(address, shlex.join(words), root, no_wait)


def _inside(path: Path, root: Path) -> Path:
    """The path as it is on the cluster, where `root` is the working directory."""
    try:
        return path.resolve().relative_to(root)
    except ValueError:
        raise UserError(
            f"{path} is not under the working directory {root}",
            "run from the folder that holds it, or give --working-dir",
        ) from None


def _submit(address: str, entrypoint: str, root: Path, no_wait: bool) -> None:
    from raydist.cluster.session import token_mode

    os.environ.update(token_mode())  # before ray reads it
    from ray.job_submission import JobStatus, JobSubmissionClient

    try:
        client = JobSubmissionClient(address)
        job = client.submit_job(
            entrypoint=entrypoint,
            runtime_env={"working_dir": str(root), "excludes": [".git", ".venv", "**/__pycache__"]},
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        line = str(error).strip().splitlines()[0]
        raise UserError(
            f"the Jobs API at {address} refused: {line}",
            "check the address (http://HEAD:8265) and, with token authentication, RAY_AUTH_MODE=token",
        ) from error
    print(f"submitted as {job}; its log: ray job logs {job} --address {address}", file=sys.stderr)
    if no_wait:
        print(job)
        return
    asyncio.run(_follow(client, job))
    status = client.get_job_status(job)
    if status != JobStatus.SUCCEEDED:
        info: Any = client.get_job_info(job)
        code = info.driver_exit_code
        if code in (2, 130, 143):
            raise typer.Exit(code)
        raise WorkerFailed(
            f"job {job} ended as {status}", (info.message or "").strip().splitlines()[0] if info.message else ""
        )


async def _follow(client: Any, job: str) -> None:
    async for lines in client.tail_job_logs(job):
        print(lines, end="", file=sys.stderr, flush=True)
