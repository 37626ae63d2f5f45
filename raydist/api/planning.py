"""Whether a job fits in memory, under which strategy, and what each strategy stores and sends: what `raydist plan` prints.

Runs in: the process of the command, or one of its own. Imports torch inside functions. Trains nothing; reads the data only for the
vocabulary size.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal

from raydist.api import speed
from raydist.api.call import check_numbers, separate
from raydist.api.scaling import intervals, scaled
from raydist.errors import UsageError
from raydist.planner.scaling import JITTER, Assumed
from raydist.planner.vocabulary import vocabulary
from raydist.run.directory import resolve

if TYPE_CHECKING:
    from raydist.planner.advice import Advice, Row
    from raydist.planner.facts import Estimate, Machine, Model
    from raydist.planner.measure import Planner
    from raydist.planner.speed import Device
    from raydist.spec import JobSpec
    from raydist.spec.load import Job, Overrides


@separate
def plan(
    spec: Job,
    *,
    set: Overrides | None = None,
    gpus: int | None = None,
    gpus_per_node: int = 8,
    memory: str | None = None,
    vocab: int | None = None,
    device: str | None = None,
    efficiency: float | None = None,
    in_node: float | None = None,
    between_nodes: float | None = None,
    search: bool = False,
    scaling: bool = False,
    weak: bool = False,
    jitter: float | None = None,
    mtbf: float | None = None,
    restart: float = 60.0,
    measured_by: str | None = None,
) -> dict[str, Any]:
    """Estimates a job's memory per device and its speed under every strategy: what `raydist plan --json` prints.

    `spec` and `set` are as for `train`, the others are the command's options: the number of GPUs (`gpus`, `gpus_per_node`); of each
    its `memory`, such as "80GiB", its name (`device`), the share of its peak that a step reaches (`efficiency`), and its bandwidth
    in GB/s (`in_node`, `between_nodes`). `search`: the best meshes instead; `scaling`: the forecast on 8 to 1,024 GPUs, for which
    are `weak`, `jitter` and `restart`. `mtbf`: in place of `checkpoint.mtbf_h`; `measured_by`: a run whose measured steps, jitter
    and checkpoints count. Raises UserErrors.
    """
    if weak and not scaling:
        raise UsageError("weak=True: goes with scaling=True", "add scaling=True")
    if search and measured_by is not None:
        raise UsageError("--search compares forecasts: --from has no part in it", "leave out one of them")
    check_numbers(
        gpus=(gpus, 1), gpus_per_node=(gpus_per_node, 1), vocab=(vocab, 1), in_node=(in_node, 0.001),
        between_nodes=(between_nodes, 0.001), mtbf=(mtbf, 1), restart=(restart, 0),
    )  # fmt: skip
    check_numbers(1, efficiency=(efficiency, 0.01), jitter=(jitter, 0))
    from raydist.spec import load
    from raydist.spec.load import naming, source_of

    given = set or {}
    if gpus is not None:
        workers = "cluster.workers"
        given = {**given, workers: gpus} if isinstance(given, Mapping) else [*given, f"{workers}={gpus}"]
    job, source = load(spec, given), source_of(spec)
    found = None
    if measured_by is not None:
        from raydist.report.measured import measured

        found = measured(resolve(measured_by))
    mtbf_h = job.checkpoint.mtbf_h if mtbf is None else mtbf
    size = parse_size(memory) if memory else None
    chosen = speed.named(device) if device else None
    vocab_size = vocab or vocabulary(job.data)
    with progress() as measuring, ExitStack() as held:
        measuring("importing torch")
        from raydist.planner.advice import advise
        from raydist.planner.facts import Machine
        from raydist.planner.measure import Planner
        from raydist.planner.target import device_memory, device_name

        here = chosen.memory if chosen else device_memory()
        kind, because = target(job, asked=any((gpus, memory, device)), here=here is not None)
        machine = Machine(job.cluster.most, gpus_per_node, kind, size or (here if kind == "cuda" else None))
        planner = Planner(job, vocab_size, kind, measuring)
        held.enter_context(planner.keeping_group())
        hardware = (chosen or speed.by_name(device_name())) if kind == "cuda" else speed.NO_GPU
        if not isinstance(hardware, str):
            hardware = hardware.but(efficiency, in_node, between_nodes)
        with naming(source):
            model = planner.model()
        if scaling:
            usual = JITTER if found is None or found.jitter is None else found.jitter
            assumed = Assumed(mtbf_h, usual if jitter is None else jitter, restart)
            return scaled(source, job, machine, model, hardware, planner, assumed, found, weak=weak)
        if search:
            return searched(source, job, machine, because, model, hardware, planner)
        advice = advise(job, machine, model, planner.measure)
        result = tell(source, job, machine, because, model, planner.attention, advice)
        speed.add(result, job, machine, model, hardware, planner)
        result["intervals"] = intervals(result, job, machine, model, hardware, mtbf_h, found)
        return result


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yields a function that shows the current activity on stderr, if that is a terminal; cleared when the block ends."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("planning") as status:
        yield lambda text: status.update(f"planning: {text}")


def parse_size(text: str, option: str = "--memory") -> int:
    """Bytes of "80GiB", "80G", "80GB" or "1e9". GB is 10^9, GiB and G are 2^30. Raises UsageError, which names the option, also for
    a memory without a unit that no device has."""
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE]\d+)?)\s*([KMGT]?)(iB|B)?\s*", text)
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    if not match or not 0 < number < math.inf:
        raise UsageError(f"{option} {text}: not a size", "write 80GiB" if option == "--memory" else "write 4MiB")
    if option == "--memory" and not match[2] and not match[3] and number < 1 << 20:  # 80 of what?
        raise UsageError(f"{option} {text}: has no unit, and no device has {text.strip()} bytes", "write 80GiB")
    power = " KMGT".index(match[2] or " ")
    return int(number * (1000 if match[3] == "B" else 1024) ** power)


def target(job: JobSpec, *, asked: bool, here: bool) -> tuple[Literal["cuda", "cpu"], str]:
    """The device type to plan for, and why. `asked`: an option names GPUs or their memory; `here`: this machine has a GPU."""
    each = job.cluster.gpus_per_worker
    if each != "auto":
        return ("cuda" if each > 0 else "cpu"), f"cluster.gpus_per_worker is {each:g}"
    if asked:
        return "cuda", "an option sets GPUs"
    if job.precision.params == "fp16":
        return "cuda", "fp16 trains on GPUs only"
    return (
        ("cuda", "this machine has a GPU")
        if here
        else ("cpu", "this machine has no GPU, and no option sets one: see --gpus")
    )


def searched(
    source: str, job: JobSpec, machine: Machine, because: str, model: Model, device: Device | str, planner: Planner
) -> dict[str, Any]:
    """The best meshes as plain values, as `--search --json` prints them. docs/how-to/plan.md lists the keys. Raises UsageError
    where there is no forecast of the speed, or no known memory."""
    from raydist.planner.search import AXES, search
    from raydist.planner.speed import refusal

    why = device if isinstance(device, str) else refusal(job, machine, device)
    if why is not None or isinstance(device, str):
        raise UsageError(f"--search compares forecasts of the speed: {why}", "name a GPU, such as --device h100")
    if machine.usable is None:
        raise UsageError("--search needs the memory of a device", "give --memory, such as 80GiB")
    begun = time.perf_counter()
    found = search(job, machine, device, planner.flops_per_token(), model.blocks, planner.of)
    return {
        "v": 1,
        "spec": source,
        "model": _about(job, model),
        "machine": _machine(machine, because),
        "speed": speed.assumptions(job, device, planner.flops_per_token()),
        "combinations": found.combinations,
        "slower": found.slower,
        "refused": found.refused,
        "too_large": found.too_large,
        "seconds": round(time.perf_counter() - begun, 1),
        "best": [
            {
                "mesh": {
                    **{name: getattr(one.spec.parallel, name) for name in AXES},
                    "micro_batch": one.spec.largest_pass[0],
                },
                "set": one.changes,
                **_rank(one.estimate, machine, one.spec),
                "speed": speed.plain(one.speed),
                "share_of_peak": one.speed.tokens_per_second
                * planner.flops_per_token()
                / (machine.ranks * (device.fp32 if job.precision.params == "fp32" else device.half)),
                "because": one.because,
            }
            for one in found.best
        ],
    }


def tell(
    source: str, job: JobSpec, machine: Machine, because: str, model: Model, attention: str, advice: Advice
) -> dict[str, Any]:
    """The plan as plain values, as --json prints it. docs/how-to/plan.md lists the keys."""
    micro, count = job.batches(machine.ranks)
    pick = advice.pick
    return {
        "v": 1,
        "spec": source,
        "model": _about(job, model),
        "machine": {
            **_machine(machine, because),
            **{axis: n for axis in ("tensor", "context", "expert") if (n := getattr(job.parallel, axis)) > 1},
            **({"pipeline": _pipeline(job, model)} if model.stages else {}),
        },
        "batch": {
            "global": job.train.global_batch,
            "micro": micro,
            "accumulation": count,
            "context": job.largest_pass[1],
            **({"max_tokens": batching.max_tokens} if (batching := job.data.batching) is not None else {}),
        },
        "precision": job.precision.params,
        "checkpoint_activations": job.train.checkpoint_activations,
        "offload": {"optimizer": job.offload.optimizer, "parameters": job.offload.parameters},
        "attention": attention,
        "strategies": [_row(row, machine, job) for row in advice.rows],
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


def _about(job: JobSpec, model: Model) -> dict[str, Any]:
    return {
        "name": job.model.name,
        "parameters": model.whole_size(),
        "trained": model.whole_size(trained=True),
        "blocks": model.blocks,
    }


def _machine(machine: Machine, because: str) -> dict[str, Any]:
    return {
        "device": machine.device,
        "because": because,
        "ranks": machine.ranks,
        "per_node": machine.per_node,
        "nodes": machine.nodes,
        "memory": machine.memory,
        "usable": machine.usable,
    }


def _pipeline(job: JobSpec, model: Model) -> dict[str, Any]:
    """The ranks of a pipeline, the stages of each, and the blocks of each stage and its share of the FLOPs."""
    return {
        "ranks": job.parallel.pipeline,
        "chunks": job.parallel.chunks,
        "blocks": [stage.blocks for stage in model.stages],
        "shares": [stage.share for stage in model.stages],
    }


def _row(row: Row, machine: Machine, job: JobSpec) -> dict[str, Any]:
    if row.estimate is None:
        return {"strategy": row.strategy, "refused": row.refused, "fits": None}
    ranks = [_rank(one, machine, job) for one in row.ranks]
    return {
        **_rank(row.estimate, machine, job),
        **({"ranks": ranks} if len(ranks) > 1 else {}),
        "refused": None,
        "fits": row.fits,
    }


def _rank(found: Estimate, machine: Machine, job: JobSpec) -> dict[str, Any]:
    """What one rank has."""
    from dataclasses import asdict

    values = asdict(found)
    for name, size in (
        ("tensor_sent", job.parallel.tensor * job.parallel.context),
        ("pipeline_sent", job.parallel.pipeline),
        ("exchanged", job.parallel.expert),
    ):
        if size == 1:
            del values[name]
    on_node = min(machine.ranks, machine.per_node)
    host, disk = values.pop("host") * on_node, values.pop("disk") * on_node
    network = values.pop("network")
    # Two copies of each rank's state; with several nodes, each node also keeps two copies of another node's ranks.
    copies = (4 if machine.nodes > 1 else 2) * values.pop("copy") * on_node
    return {
        **values,
        "total": found.total,
        "sent_in_node": found.within_node,
        "sent_over_network": network,
        "host_per_node": host,
        "disk_per_node": disk,
        "copies_per_node": copies,
    }
