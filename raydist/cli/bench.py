"""`raydist bench`: measures a cluster's network.

Runs in: the user's shell, or a Ray job's driver. Imports ray and torch inside commands only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raydist.planner.vocabulary import vocabulary
from raydist.private_files import temporary_folder

if TYPE_CHECKING:
    from raydist.spec import JobSpec

app = typer.Typer(help="Measure a cluster's network.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Measure a cluster's network."""


@app.command()
def comm(
    spec: Annotated[
        Path | None,
        typer.Argument(
            help="A job file: its workers, and the time of its gradients. Without one, only the links.",
            show_default=False,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Override a field, such as cluster.workers=4."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="local: a private Ray; auto or HOST:PORT: a cluster. Default: auto in a Ray job, else local."
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Ranks. Default: the job's; else one per GPU, else one per node; at least two.",
            show_default=False,
        ),
    ] = None,
    ops: Annotated[
        list[str] | None,
        typer.Option(
            "--op",
            help="all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, send_recv; may be repeated. Default: all.",
            show_default=False,
        ),
    ] = None,
    least: Annotated[str, typer.Option("--min-bytes", help="The smallest size, such as 1KiB.")] = "1KiB",
    most: Annotated[str, typer.Option("--max-bytes", help="The largest size, such as 256MiB.")] = "256MiB",
    factor: Annotated[int, typer.Option(help="Ratio of each size to the previous one.")] = 4,
    dtypes: Annotated[
        list[str] | None,
        typer.Option("--dtype", help="fp32 or bf16; may be repeated. Default: fp32.", show_default=False),
    ] = None,
    iterations: Annotated[
        int, typer.Option("--iters", help="Iterations per size; fewer if one size would take over 2 s.")
    ] = 20,
    vocab: Annotated[
        int | None,
        typer.Option(min=1, help="Vocabulary size of the job; default: read from its data.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Measure collectives, pairs of nodes and the time of a job's gradients; suggest a bucket size."""
    from dataclasses import asdict, replace

    from raydist.api.planning import parse_size
    from raydist.bench.options import OPS, Ask
    from raydist.extension_plans import buckets

    job = _job(spec, overrides or [], workers)
    gradients, vocab_size = None, 0
    ask = Ask(
        ops=ops or OPS,
        dtypes=dtypes or ["fp32"],
        least=parse_size(least, "--min-bytes"),
        most=parse_size(most, "--max-bytes"),
        factor=factor,
        iterations=iterations,
    )
    if spec is not None:
        from raydist.planner.measure import Planner

        vocab_size = vocab or vocabulary(job.data)
        model = Planner(job, vocab_size, "cpu").model()
        gradients = (4 if job.precision.reduce == "fp32" else 2) * model.most_trained(job.parallel.pipeline)
    tried = spec is not None and buckets(job.parallel.strategy)
    ask = replace(
        ask,
        gradients=gradients,
        vocab=vocab_size,
        job=job.model_dump(mode="json") if tried else None,
        threads=max(1, int(job.cluster.cpus_per_worker)),
    )
    from raydist.cluster.place import session_of, where

    with (
        temporary_folder() as logs,
        session_of(job, where(address), logs, own_code=bool(job.own_code())) as session,
    ):
        from raydist.cluster import bench

        if spec is None and workers is None:
            job = _job(None, [], bench.workers(session))
        result = bench.run("raydist.bench.comm:in_ranks", asdict(ask), job, session, spread=spec is None)
    if as_json:
        print(json.dumps(result))
    else:
        from raydist.report.comm import show

        show(result)
    if any(row["wrong"] for row in result["collectives"]):
        print("raydist: a collective returned wrong values: see #wrong", file=sys.stderr)
        raise typer.Exit(3)


def _job(spec: Path | None, overrides: list[str], workers: int | None) -> JobSpec:
    """The job of the file; without one, a minimal job with that many workers. Raises SpecError, UsageError."""
    from raydist.errors import UsageError
    from raydist.spec import load, parse

    if spec is not None:
        return load(spec, [*overrides, *([f"cluster.workers={workers}"] if workers else [])])
    if overrides:
        raise UsageError("--set without a job", "give the job's file, or leave out --set")
    count = workers or 2
    train = {"steps": 1, "global_batch": count, "micro_batch": 1}
    return parse({"name": "bench", "data": {"source": "none"}, "train": train, "cluster": {"workers": count}})
