"""`raydist deploy`: what to apply so that a job runs on Kubernetes, on Slurm, or in two containers.

Runs in: the user's shell. Starts nothing, and imports neither ray nor torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raydist.cli import options, output
from raydist.errors import UsageError
from raydist.redact import redact
from raydist.run.directory import SPEC, check_name

if TYPE_CHECKING:
    from raydist.spec import JobSpec

app = typer.Typer(help="Print what to apply for a cluster: KubeRay, Slurm or compose.", no_args_is_help=True)

Spec = Annotated[Path, typer.Argument(help="The job: a YAML file.", show_default=False)]
Out = Annotated[
    Path | None, typer.Option("-o", "--out", help="Write into this folder instead of printing.", show_default=False)
]
Several = list[str] | None


@app.callback()
def _group() -> None:
    """Print what to apply for a cluster: KubeRay, Slurm or compose."""


@app.command()
def kuberay(
    spec: Spec,
    image: Annotated[str, typer.Option(help="The image with raydist: deploy/docker/Dockerfile.", show_default=False)],
    storage: Annotated[
        str, typer.Option(help="URI of the runs, or a path below a --claim, as the pods see it.", show_default=False)
    ],
    overrides: options.Overrides = None,
    name: options.Name = None,
    namespace: Annotated[str | None, typer.Option(help="Namespace of Kubernetes.", show_default=False)] = None,
    claim: Annotated[
        Several, typer.Option(metavar="NAME:/PATH", help="A PersistentVolumeClaim that every pod mounts; repeatable.")
    ] = None,
    node_selector: Annotated[
        Several, typer.Option(metavar="KEY=VALUE", help="A label of the workers' machines.")
    ] = None,
    toleration: Annotated[
        Several, typer.Option(metavar="KEY[=VALUE][:EFFECT]", help="A taint that the workers accept.")
    ] = None,
    network: Annotated[
        str | None, typer.Option(help="Multus networks of the workers, such as rdma-net.", show_default=False)
    ] = None,
    device: Annotated[
        Several,
        typer.Option(metavar="NAME=COUNT", help="A device of each worker besides its GPUs, such as rdma/hca=8."),
    ] = None,
    env_secret: Annotated[
        Several, typer.Option(metavar="NAME", help="A Secret whose keys become variables, such as credentials of S3.")
    ] = None,
    token_secret: Annotated[
        str | None,
        typer.Option(help="A Secret with Ray's token, key auth_token; default: KubeRay makes one.", show_default=False),
    ] = None,
    out: Out = None,
) -> None:
    """Print a RayJob for KubeRay, for `kubectl apply -f -`."""
    from raydist.deploy.kuberay import KubernetesOptions, manifests
    from raydist.spec import dump, stored

    job = _job(spec, overrides)
    if dump(job) != stored(job):
        raise UsageError(
            f"{spec}: contains secrets, and everyone who reads the manifest would see them",
            "put them into a Secret, and give --env-secret NAME",
        )
    _check_secrets([storage])
    _found_in_pods(job)
    chosen = KubernetesOptions(
        image,
        storage,
        namespace,
        claim or (),
        node_selector or (),
        toleration or (),
        network,
        device or (),
        env_secret or (),
        token_secret,
    )
    run = check_name(name or job.name)
    _give(manifests(job, run, chosen), out, f"{run}.yaml")


@app.command()
def slurm(
    spec: Spec,
    overrides: options.Overrides = None,
    name: options.Name = None,
    storage: options.Storage = None,
    time: Annotated[
        str | None, typer.Option(help="Time limit; the job is queued again after it.", show_default=False)
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Partition of Slurm.", show_default=False)] = None,
    account: Annotated[str | None, typer.Option(help="Account of Slurm.", show_default=False)] = None,
    sbatch: Annotated[
        Several, typer.Option(metavar="--OPTION=VALUE", help="Another option of sbatch, such as --constraint=ib.")
    ] = None,
    out: Out = None,
) -> None:
    """Print a batch script for Slurm, for `sbatch`. It runs in this folder, with this Python."""
    from raydist.deploy.slurm import SlurmOptions, script

    job = _job(spec, overrides)
    run = check_name(name or job.name)
    train = _train(spec, overrides, run, *(["--storage", storage] if storage else []))
    chosen = SlurmOptions(train, Path.cwd(), Path(sys.executable).parent, time, partition, account, sbatch or ())
    _give(script(job, run, chosen), out, f"{run}.sbatch")


@app.command()
def compose(
    spec: Spec,
    image: Annotated[str, typer.Option(help="The image with raydist: deploy/docker/Dockerfile.")] = "raydist",
    overrides: options.Overrides = None,
    name: options.Name = None,
    out: Out = None,
) -> None:
    """Print a compose file with two nodes on one machine, for `docker compose up`. Its folder is this one."""
    from raydist.deploy.compose import compose as made

    inside = Path(os.path.relpath(spec))
    if inside.parts[0] == "..":
        raise UsageError(
            f"{spec}: only this folder is in the containers", "change into a folder that has the job's files"
        )
    job = _job(spec, overrides)
    _give(made(job, image, _train(inside, overrides, check_name(name or job.name))), out, "compose.yaml")


def _job(spec: Path, overrides: list[str] | None) -> JobSpec:
    from raydist.spec import load

    return load(spec, overrides or [])


def _train(spec: Path, overrides: list[str] | None, run: str, *more: str) -> list[str]:
    """The arguments of `raydist train`."""
    words = [str(spec), *(word for text in overrides or [] for word in ("--set", text)), "--name", run, *more]
    _check_secrets(words)
    return words


def _check_secrets(words: Sequence[str]) -> None:
    """Raises UsageError for secrets, as in a URI."""
    if secret := [redact(word) for word in words if redact(word) != word]:
        raise UsageError(
            f"{', '.join(secret)}: contains secrets, which would be in the file",
            "leave them out, and give them in the environment",
        )


def _found_in_pods(job: JobSpec) -> None:
    """Raises UsageError for data or weights with a relative path: a pod has no folder of the user's."""
    from raydist.api.submitting import files_of
    from raydist.checkpoint.source import split

    named = files_of(job)
    start = job.init_from
    # A run's name, or a sweep's and a cell's, is looked for in the storage that the pods have, too.
    if (
        start is not None
        and "://" not in start
        and (start.startswith((".", "~")) or (Path(split(start)[0]) / SPEC).is_file())
    ):
        named["init_from"] = start
    unused = ("data.tokenizer", "data.chat_template") if job.data.path is not None else ()
    for field, value in named.items():
        if not value.startswith("/") and field not in unused:
            raise UsageError(
                f"{field}: {value} is relative to a folder that no pod has",
                "give a URI, or an absolute path below a --claim or in the image",
            )


def _give(text: str, out: Path | None, name: str) -> None:
    if out is None:
        print(text, end="")
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"--out {out}: cannot be made: {why}", "give a folder") from None
    output.write(out / name, text)
    print(out / name)
