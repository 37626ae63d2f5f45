"""Calculated seconds of a step: FLOPs over a share of the GPU's peak, plus communication and offload without overlap.

Runs anywhere. Plain python: no torch, no ray. docs/how-to/plan.md explains the assumptions.

    compute    FLOPs of the fullest rank / (peak of the precision x efficiency); for a small model, its kernel launches
    tensor     all collectives of a tensor group, not overlapped
    exposed    time of collectives beyond the part of the step that they overlap:
               ddp    the sum, beside the last micro-batch's backward
               zero1  the sum, beside the last micro-batch's backward; the gather, beside the next step's first forward
               zero2  the sums, beside every backward; the gather as zero1's
               zero3  gathers and sums, beside the whole step
               hsdp   the same within a group; the sum across groups, beside the last micro-batch's backward
               comm.every   what ddp sends, and hsdp across groups, is an outer step: beside comm.delay steps, or else nothing
               The last sum, and the gather before the first forward, overlap with nothing. On gloo FSDP2's overlap with nothing.
    waits      of a rank of a pipeline: the schedule's actions in order, each with its stage's time, and the transfers in between
    offload    gradients down beside the last backward; the update on the host and the new values up, not overlapped
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raydist.planner.facts import Activations, Machine, Model, Traffic
from raydist.planner.shares import parts_of, plan_of, replicas, shard_of, units
from raydist.planner.traffic import last_share, tensor_traffic, traffic
from raydist.worker.metrics.flops import GPUS, known_device
from raydist.worker.pipeline_schedule import Timeline, timeline

if TYPE_CHECKING:
    from raydist.spec import JobSpec

EFFICIENCY = 0.4
"""Share of the peak. Llama 3 405B on 8,192 and 16,384 H100s: 0.38 to 0.43 (arXiv 2407.21783, table 4); torchtitan, 8B on 8 to 128
H100s: 0.33 to 0.39 (arXiv 2410.06511)."""
_LAUNCH_S = 1e-3
"""Minimum seconds of a block, forward and backward of a micro-batch: about 100 kernel launches of 5 to 10 us each."""
_HOST_BYTES = 25e9
"""Bytes/s of host memory for a rank's update: eight ranks share two sockets' 400 to 600 GB/s, and reach half of it."""
_UPDATE_BYTES = 28
"""Bytes of host memory traffic per parameter: AdamW reads weight, gradient and two moments, and writes all but the gradient."""

_GB = 1e9


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU: FLOP/s in half precision and in fp32, the reachable share of it (`efficiency`), and bytes/s one way.

    `network`: None if unknown. `memory`: bytes, as torch counts them.
    """

    name: str
    half: float
    fp32: float
    efficiency: float
    node: float
    network: float | None
    host: float
    memory: int

    def but(self, efficiency: float | None, node_gb: float | None, network_gb: float | None) -> Device:
        """The device with values given by the user; links in GB/s."""
        return replace(
            self,
            efficiency=self.efficiency if efficiency is None else efficiency,
            node=self.node if node_gb is None else node_gb * _GB,
            network=self.network if network_gb is None else network_gb * _GB,
        )


_BY_NAME = {name.lower().replace(" ", "-"): name for name in GPUS}
NAMES = tuple(
    shown
    for short, name in _BY_NAME.items()
    for shown in (short, *(f"{short}-{size}" for size in GPUS[name].memory if len(GPUS[name].memory) > 1))
)
"""As a user writes them; with the GB of memory where there are several of that name."""


def find(name: str) -> Device | None:
    """The GPU of that name, as users, drivers or Ray spell it: `h100-pcie`, `a100-40`, `NVIDIA A100-SXM4-40GB`. None: unknown."""
    short = re.sub(r"[ _]+", "-", name.strip().lower())
    sizes = [int(found) for found in re.findall(r"(?<=-)(\d+)(?:gb)?(?=-|$)", short)]
    known = _BY_NAME.get(short) or _BY_NAME.get(short.rpartition("-")[0]) or known_device(name)
    if known is None or (
        short not in _BY_NAME and known_device(name) is None and not {*sizes} & GPUS[known].memory.keys()
    ):
        return None
    gpu = GPUS[known]
    node, network = gpu.node, gpu.network
    if "pcie" in short:
        node, network = gpu.host, None  # an A100 may be one: its name says so
    memory = next((gpu.memory[size] for size in sizes if size in gpu.memory), next(iter(gpu.memory.values())))
    return Device(
        known,
        gpu.half,
        gpu.fp32,
        EFFICIENCY,
        node * _GB,
        None if network is None else network * _GB,
        gpu.host * _GB,
        int(memory * 2**30),
    )


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds per step of one strategy, of the rank that ends last. `communication`: of all collectives; `exposed`: the part that
    overlaps with nothing; `waits`: of a rank of a pipeline, for other stages and for transfers.

    `bubble`: the share of the passes' time in which the ranks of a pipeline wait, on average.
    """

    compute: float
    communication: float
    exposed: float
    waits: float
    offload: float
    tokens_per_second: float
    bubble: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute + self.exposed + self.waits + self.offload


def refusal(spec: JobSpec, machine: Machine, device: Device) -> str | None:
    """Why a job's speed cannot be calculated; None if it can."""
    if spec.offload.optimizer == "nvme":
        return "the speed of the disk of offload.path is not known"
    if spec.offload.parameters == "cpu" and machine.ranks > 1:
        return "the speed with offload.parameters cannot be calculated"
    if device.network is None and machine.nodes > 1:
        return f"the network between nodes with {device.name} is not known: give --between-nodes GB/s"
    if spec.precision.params == "bf16" and device.name in ("V100", "T4"):
        return f"{device.name} has no bf16 units, so bf16 is refused: set precision: fp16"
    return None


def speed(
    strategy: str,
    spec: JobSpec,
    machine: Machine,
    model: Model,
    device: Device,
    flops_per_token: float,
    passes: Sequence[Activations] = (),
    play: Callable[..., Timeline] = timeline,
) -> Speed:
    """The speed under a strategy that has no `refusal`. `flops_per_token`: the model's own count. `passes`: as measured, of each
    stage; they may be left out where nothing is sent within a replica. `play`: with `soonest` no forecast is faster."""
    parallel = spec.parallel
    micro, count = spec.batches(machine.ranks)
    tensor, ranks = parallel.tensor, parallel.pipeline
    stages = [stage.model for stage in model.stages] or [model]
    again = spec.train.checkpoint_activations == "full"
    peak = device.fp32 if spec.precision.params == "fp32" else device.half
    each = flops_per_token * micro * spec.largest_pass[1] / (tensor * parallel.context * peak * device.efficiency)
    tensor_link = _tensor_link(tensor * parallel.context, machine, device)
    # An all-to-all over nodes is limited by what leaves a node.
    expert_link = device.node if parallel.expert <= machine.per_node else min(device.node, device.network or 0.0)
    forward, backward, in_group = [], [], []
    for n, stage in enumerate(stages):
        once = each * (model.stages[n].share if model.stages else 1.0)
        once = max(once, _LAUNCH_S * (1 + stage.blocks))
        sent = passes[n].tensor_sent / tensor_link + passes[n].exchanged / expert_link if passes else 0.0
        # Backward takes twice the forward; activation checkpointing recomputes blocks once, and sends again.
        forward.append((once / 3, sent / (3 if again else 2)))
        backward.append((once * (2 / 3 + (1 / 3 if again else 0.0)), sent - forward[-1][1]))
        group = tensor_traffic(strategy, spec, machine, stage, passes[n]) / tensor_link if passes else 0.0
        in_group.append(group + count * passes[n].exchanged / expert_link if passes else 0.0)
    apart = machine.ranks // ranks
    ways = [
        passes[n].passed_on / _transfer_link(n % ranks, (n + 1) % ranks, apart, machine, device) if passes else 0.0
        for n in range(len(stages) - 1)
    ]
    line = play([sum(t) for t in forward], [sum(t) for t in backward], ranks, count, ways)
    found = []
    for rank in range(ranks):
        own = range(rank, len(stages), ranks)
        compute = count * sum(forward[n][0] + backward[n][0] for n in own)
        ahead, last = sum(forward[n][0] for n in own), sum(backward[n][0] for n in own)
        sums = [traffic(strategy, spec, machine, stages[n]) for n in own]
        alone = max(last_share(strategy, spec, machine, stages[n]) for n in own)
        communication, exposed = _exposed(strategy, spec, machine, device, sums, alone, compute, ahead, last)
        group = sum(in_group[n] for n in own)
        offload = 0.0
        if spec.offload.optimizer == "cpu":
            parts = [(part, over) for n in own for part, _, over in parts_of(strategy, spec, machine, stages[n])]
            trained = sum(sum(units(part, over, trained=True).values()) for part, over in parts)
            way = 4 * trained / device.host
            offload = max(0.0, way - last) + max(_UPDATE_BYTES * trained / _HOST_BYTES, way)
        waits = line.ends[rank] - line.busy[rank]
        found.append(Speed(compute, communication + group, exposed + group, waits, offload, 0.0, line.bubble))
    slowest = max(found, key=lambda speed: speed.seconds)
    batching = spec.data.batching
    tokens = spec.train.global_batch * spec.largest_pass[1]
    if batching is not None and batching.global_tokens is not None:
        tokens = batching.global_tokens
    return replace(slowest, tokens_per_second=tokens / slowest.seconds)


def _exposed(
    strategy: str,
    spec: JobSpec,
    machine: Machine,
    device: Device,
    sent: Sequence[Traffic],
    alone: float,
    compute: float,
    ahead: float,
    last: float,
) -> tuple[float, float]:
    """(seconds of the collectives along `data`, those beyond what they overlap with) of a rank that computes `compute` seconds in a
    step, `ahead` of them in the first forward pass, and `last` in the last backward pass. `alone`: the share of the collectives
    that nothing overlaps."""
    shard, sharded, count = (
        shard_of(strategy, spec, machine),
        plan_of(strategy).sharded,
        spec.batches(machine.ranks)[1],
    )
    # Rings over replicas: those of the ranks of a tensor group run at the same time, and share the network of a node.
    of_replicas = replace(
        machine, ranks=replicas(spec, machine), per_node=max(machine.per_node // spec.parallel.tensor, 1)
    )
    within, across = _links(shard if sharded else of_replicas.ranks, of_replicas, device)
    gathers, sums = sum(s.gathers for s in sent) / within, sum(s.sums for s in sent) / within
    between = sum(s.across for s in sent) / across
    if "parameters" in sharded:
        beside = 0.0 if machine.device == "cpu" else compute
        across = max(0.0, between - last) if spec.comm.every is None else _outer_exposed(spec, between, compute)
        exposed = max(alone * (gathers + sums) / count, gathers + sums - beside) + across
    elif spec.comm.every is not None:
        exposed = _outer_exposed(spec, sums, compute)
    else:  # beside the backward passes of all micro-batches, or of the last one
        beside = last * count if "gradients" in sharded else last
        once = sums / count if "gradients" in sharded else sums
        exposed = max(alone * once, sums - beside) + max(alone * gathers, gathers - ahead)
    return gathers + sums + between, exposed


def _outer_exposed(spec: JobSpec, seconds: float, compute: float) -> float:
    """Of outer steps that take so many seconds a step on average, those beyond the `comm.delay` steps that each overlaps."""
    comm = spec.comm
    assert comm.every is not None
    times = comm.fragments / comm.every
    return max(0.0, seconds / times - comm.delay * compute) * times


def _transfer_link(source: int, target: int, apart: int, machine: Machine, device: Device) -> float:
    """Bytes/s of a rank to the same rank of another stage, which is on the ranks `apart` beyond: the slowest of all of them."""
    same = all(
        (source * apart + n) // machine.per_node == (target * apart + n) // machine.per_node for n in range(apart)
    )
    return device.node if same else min(device.node, device.network or 0.0)


def _tensor_link(tensor: int, machine: Machine, device: Device) -> float:
    """Bytes/s of a rank to its tensor group: that of a node, or where the least part of a group on a node shares its network."""
    on_node = math.gcd(tensor, machine.per_node)
    if on_node == tensor or machine.nodes == 1:
        return device.node
    return min(device.node, (device.network or 0.0) * on_node)


def _links(group: int, machine: Machine, device: Device) -> tuple[float, float]:
    """Bytes/s of a rank in a ring over a group of consecutive ranks, and in one over ranks that are so far apart.

    A ring over nodes leaves each node once, so it can use the network of all ranks there.
    """
    network = device.network or 0.0
    on_node = min(group, machine.per_node)
    within = device.node if group <= machine.per_node else min(device.node, network * on_node)
    apart = max(machine.per_node // group, 1)  # ranks of a node that are in one ring across
    across = device.node if machine.nodes == 1 else min(device.node, network * apart)
    return within, across
