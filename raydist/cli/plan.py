"""`raydist plan`: whether a job fits in memory, under which strategy, and what each strategy stores and sends.

Runs in: the user's shell. Imports torch inside the command. Trains nothing; reads the data only for the vocabulary size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from raydist.cli.output import write
from raydist.errors import UsageError


def plan(
    spec: Annotated[Path, typer.Argument(help="The job: a YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Override a field, such as optim.lr=3e-4.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Number of GPUs; default: the most that cluster.workers allows.")
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs per node; hsdp shards within a node.")] = 8,
    memory: Annotated[
        str | None,
        typer.Option(help="Memory of one device, such as 80GiB; default: from --device, else this machine's GPU."),
    ] = None,
    vocab: Annotated[
        int | None, typer.Option(min=1, help="Vocabulary size; default: read from the job's data.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--device", help="GPU to plan for, such as h100 or a100-40; default: this machine's."),
    ] = None,
    efficiency: Annotated[
        float | None,
        typer.Option(min=0.01, max=1, help="Share of the GPU's peak FLOP/s that a step reaches; default: 0.4."),
    ] = None,
    in_node: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            metavar="GB/S",
            help="Bandwidth of a GPU within its node, one way; default: from its specification.",
        ),
    ] = None,
    between_nodes: Annotated[
        float | None,
        typer.Option(
            min=0.001, metavar="GB/S", help="Bandwidth of a GPU to other nodes, one way; default: as in a DGX."
        ),
    ] = None,
    search: Annotated[
        bool,
        typer.Option(
            "--search",
            help="The five best meshes: tensor x context x pipeline x chunks x expert x strategy x micro-batch, by forecast "
            "speed.",
        ),
    ] = False,
    scaling: Annotated[
        bool,
        typer.Option("--scaling", help="The job's forecast on 8 to 1,024 GPUs, and where the rest of the time goes."),
    ] = False,
    weak: Annotated[bool, typer.Option("--weak", help="--scaling: the global batch grows with the GPUs.")] = False,
    jitter: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="--scaling: deviation of a rank's time for a step, over its mean; default: 0.01, or --from's.",
        ),
    ] = None,
    mtbf: Annotated[
        float | None, typer.Option(min=1, help="Hours between two failures of one GPU; default: checkpoint.mtbf_h.")
    ] = None,
    measured_by: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="A run of this job, by name, path or URI: its measured steps, jitter and checkpoints count.",
        ),
    ] = None,
    restart: Annotated[float, typer.Option(min=0, help="--scaling: seconds from a failure to the next step.")] = 60.0,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="--scaling: write a page to this file.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Estimate a job's memory per device and its speed under every strategy; list which fit, and recommend one."""
    if (weak or out is not None) and not scaling:
        raise UsageError("--weak and -o go with --scaling", "add --scaling")
    from raydist.api import planning

    result = planning.plan.here(
        spec, set=overrides, gpus=gpus, gpus_per_node=gpus_per_node, memory=memory, vocab=vocab, device=gpu, efficiency=efficiency,
        in_node=in_node, between_nodes=between_nodes, search=search, scaling=scaling, weak=weak, jitter=jitter, mtbf=mtbf,
        restart=restart, measured_by=measured_by,
    )  # fmt: skip
    if out is not None:
        from raydist.report.html.scaling import render

        write(out, render(result))
    if as_json:
        print(json.dumps(result))
        return
    from raydist.report import plan as shown

    (shown.show_scaling if scaling else shown.show_search if search else shown.show)(result)
    if out is not None:
        print(f"page: {out}")
