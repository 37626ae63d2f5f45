"""`raydist train`: trains one job to its end, on a private Ray or on a cluster.

Runs in: the user's shell, or a Ray job's driver. Imports ray inside the command; never torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raydist.cli import options

if TYPE_CHECKING:
    from raydist.api.training import Ended


def train(
    spec: Annotated[Path, typer.Argument(help="The job: a YAML file.", show_default=False)],
    overrides: options.Overrides = None,
    deepspeed: options.DeepSpeed = None,
    name: options.Name = None,
    storage: options.Storage = None,
    address: options.Address = None,
    resume: Annotated[bool, typer.Option("--resume", help="Only resume an existing run.")] = False,
    fresh: options.Fresh = False,
    until: options.Until = None,
    allow_spec_change: Annotated[
        bool,
        typer.Option("--allow-spec-change", help="Resume even if the changed spec computes other numbers than before."),
    ] = False,
    faults: options.Faults = None,
    wait_for_driver: options.WaitForDriver = 0.0,
    wait_for_nodes: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="How long to wait for the cluster to start, and for nodes to join while it has too few for the job.",
        ),
    ] = 0.0,
    exclude_slow: Annotated[
        bool,
        typer.Option(
            "--exclude-slow", help="Measure the nodes first, as `raydist check` does, and leave out the slow ones."
        ),
    ] = False,
    dashboard: options.Dashboard = False,
    as_json: options.LastJson = False,
) -> None:
    """Train a job to its end. The same command again resumes it."""
    from raydist.api import training

    ended = training.train(
        spec, set=overrides, deepspeed=deepspeed, name=name, storage=storage, address=address, resume=resume, fresh=fresh,
        until=until, allow_spec_change=allow_spec_change, faults=faults, wait_for_driver=wait_for_driver,
        wait_for_nodes=wait_for_nodes, exclude_slow=exclude_slow, dashboard=dashboard,
    )  # fmt: skip
    print_end(ended, as_json)


def print_end(ended: Ended, as_json: bool) -> None:
    """Prints the end of a run in a few lines, status, folder and losses, or as JSON. Raises typer.Exit if it was interrupted."""
    from raydist.report.summary import show

    if ended.code:
        raise typer.Exit(ended.code)
    shown = show(ended.run)
    if as_json:
        print(json.dumps(shown))
        return
    print(f"run {shown['run']}: {shown['status']} at step {shown['steps']}, in {shown['path']}")
    if shown["loss"] is not None:
        print(f"train loss {shown['loss']:.4f}, {shown['tokens_per_second']:,.0f} tokens/s")
    if shown["eval_loss"] is not None and (dataset := ended.dataset) is not None:
        index = dataset.index
        unigram = f"; its byte unigram: {index.unigram_nats:.4f}" if dataset.tokenizer.name == "bytes" else ""
        print(f"eval loss {shown['eval_loss']:.4f} nats per token of the held-out text{unigram}")
