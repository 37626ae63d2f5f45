"""`raydist plan`: does a job fit, under which strategy, and what each one holds and sends.

Runs in: the user's shell. Imports torch inside the command; trains nothing and reads no data, but for the size of its vocabulary.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from raydist.cli import speed
from raydist.errors import UsageError
from raydist.planner.vocabulary import vocabulary

if TYPE_CHECKING:
    from raydist.planner.advice import Advice, Row
    from raydist.planner.facts import Machine, Model
    from raydist.spec import JobSpec


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(plan)


def plan(
    spec: Annotated[Path, typer.Argument(help="The job: a YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Override a field, such as optim.lr=3e-4.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs to train on; default: cluster.workers, the most of them.")
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of a node: the group of hsdp.")] = 8,
    memory: Annotated[
        str | None, typer.Option(help="Of one device, such as 80GiB; default: that of --device, else of the GPU here.")
    ] = None,
    vocab: Annotated[
        int | None, typer.Option(min=1, help="Size of the vocabulary; default: what the job's data says.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--device", help="GPU to plan for, such as h100 or a100-40; default: the one here."),
    ] = None,
    efficiency: Annotated[
        float | None,
        typer.Option(min=0.01, max=1, help="Share of the GPU's peak that a step's FLOPs are done at; default: 0.4."),
    ] = None,
    in_node: Annotated[
        float | None,
        typer.Option(min=0.001, metavar="GB/S", help="Of a GPU to those of its node, one way; default: the GPU's."),
    ] = None,
    between_nodes: Annotated[
        float | None,
        typer.Option(min=0.001, metavar="GB/S", help="Of a GPU to other nodes, one way; default: a DGX of it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Say what a job needs of each device under every strategy, which fit, which to take, and how fast it would be."""
    from raydist.planner.facts import Machine
    from raydist.spec import load

    job = load(spec, [*(overrides or []), *([f"cluster.workers={gpus}"] if gpus else [])])
    size = parse_size(memory) if memory else None
    chosen = speed.named(gpu) if gpu else None
    vocab_size = vocab or vocabulary(job.data)
    with progress() as measuring:
        measuring("importing torch")
        from raydist.planner.advice import advise
        from raydist.planner.measure import Planner, device_memory, device_name

        here = chosen.memory if chosen else device_memory()
        device, because = target(job, asked=any((gpus, memory, gpu)), here=here is not None)
        machine = Machine(job.cluster.most, gpus_per_node, device, size or (here if device == "cuda" else None))
        planner = Planner(job, vocab_size, device, measuring)
        model = planner.model()
        advice = advise(job, machine, model, planner.measure)
        told = tell(str(spec), job, machine, because, model, planner.attention, advice)
        reckoned = (chosen or speed.by_name(device_name())) if device == "cuda" else speed.NO_GPU
        if not isinstance(reckoned, str):
            reckoned = reckoned.but(efficiency, in_node, between_nodes)
        speed.add(told, job, machine, model, reckoned, planner.flops_per_token)
    if as_json:
        print(json.dumps(told))
    else:
        from raydist.report.plan import show

        show(told)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Shows what it is told that is being done, on stderr, where that is a terminal; gone with the block."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("planning") as status:
        yield lambda text: status.update(f"planning: {text}")


def parse_size(text: str, option: str = "--memory") -> int:
    """Bytes of "80GiB", "80G", "80GB" or "1e9". GB is 10^9, GiB and G are 2^30. Raises UsageError, which names the option."""
    found = re.fullmatch(r"\s*([0-9.]+(?:[eE]\d+)?)\s*([KMGT]?)(iB|B)?\s*", text)
    try:
        number = float(found[1]) if found else 0.0
    except ValueError:
        number = 0.0
    if not found or not 0 < number < math.inf:
        raise UsageError(f"{option} {text}: no size", "write 80GiB" if option == "--memory" else "write 4MiB")
    power = " KMGT".index(found[2] or " ")
    return int(number * (1000 if found[3] == "B" else 1024) ** power)


def target(job: JobSpec, *, asked: bool, here: bool) -> tuple[Literal["cuda", "cpu"], str]:
    """The device type to plan for, and why. `asked`: GPUs or their memory were named; `here`: this machine has one."""
    each = job.cluster.gpus_per_worker
    if each != "auto":
        return ("cuda" if each > 0 else "cpu"), f"cluster.gpus_per_worker is {each:g}"
    if asked:
        return "cuda", "GPUs were asked for"
    if job.precision.params == "fp16":
        return "cuda", "fp16 trains on GPUs only"
    return ("cuda", "this machine has a GPU") if here else ("cpu", "no GPU here, and none asked for: see --gpus")


def tell(
    source: str, job: JobSpec, machine: Machine, because: str, model: Model, attention: str, advice: Advice
) -> dict[str, Any]:
    """All of a plan as plain values: what --json prints. docs/plan.md has its keys."""
    from raydist.planner.estimate import batches

    micro, count = batches(job, machine.ranks)
    pick = advice.pick
    return {
        "v": 1,
        "spec": source,
        "model": {
            "name": job.model.name,
            "parameters": model.size(),
            "trained": model.size(trained=True),
            "blocks": len({p.unit for p in model.params if p.unit >= 0}),
        },
        "machine": {
            "device": machine.device,
            "because": because,
            "ranks": machine.ranks,
            "per_node": machine.per_node,
            "nodes": machine.nodes,
            "memory": machine.memory,
            "usable": machine.usable,
        },
        "batch": {
            "global": job.train.global_batch,
            "micro": micro,
            "accumulation": count,
            "context": job.model.context,
        },
        "precision": job.precision.params,
        "checkpoint_activations": job.train.checkpoint_activations,
        "offload": {"optimizer": job.offload.optimizer, "parameters": job.offload.parameters},
        "attention": attention,
        "strategies": [_row(row, machine) for row in advice.rows],
        "pick": pick
        and {
            "strategy": pick.estimate.strategy,
            "total": pick.estimate.total,
            "micro_batch": pick.micro_batch,
            "set": pick.changes,
            "because": pick.because,
        },
        "suggestions": list(advice.suggestions),
    }


def _row(row: Row, machine: Machine) -> dict[str, Any]:
    from dataclasses import asdict

    if row.estimate is None:
        return {"strategy": row.strategy, "refused": row.refused, "fits": None}
    found = asdict(row.estimate)
    on_node = min(machine.ranks, machine.per_node)
    host, disk = found.pop("host") * on_node, found.pop("disk") * on_node
    # Two of each rank's, and of several nodes each keeps another one's two as well.
    copies = (4 if machine.nodes > 1 else 2) * found.pop("copy") * on_node
    return {
        **found,
        "total": row.estimate.total,
        "host_per_node": host,
        "disk_per_node": disk,
        "copies_per_node": copies,
        "refused": None,
        "fits": row.fits,
    }
