"""Seconds of a step, reckoned and not measured: FLOPs over a share of the GPU's peak, bytes over the links, what overlaps left out.

Runs anywhere. Plain python: no torch, no ray. docs/plan.md has the assumptions in words.

    compute    FLOPs of the fullest rank / (peak of the precision x efficiency); of a small model the launching of its kernels
    exposed    what its collectives take beyond the part of the step that they run beside:
               ddp    the sum, beside the last micro-batch's backward
               zero1  the sum, beside the last micro-batch's backward; the gather, beside the next step's first forward
               zero2  the sums, beside every backward; the gather as zero1's
               zero3  gathers and sums, beside the whole step
               hsdp   the same within a group; the sum across groups, beside the last micro-batch's backward
    offload    gradients down beside the last backward; the update on the host and the new values up, beside nothing
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raydist.worker.flops import PEAK_FLOPS, PEAK_FP32, known_device
from raydist.worker.plan.estimate import batches, shard_of, traffic
from raydist.worker.plan.facts import ROOT, Machine, Model

if TYPE_CHECKING:
    from raydist.spec import JobSpec

EFFICIENCY = 0.4
"""Share of the peak. Llama 3 405B on 8,192 and 16,384 H100s: 0.38 to 0.43 (arXiv 2407.21783, table 4); torchtitan, 8B on 8 to 128
H100s: 0.33 to 0.39 (arXiv 2410.06511)."""
_LAUNCH_S = 1e-3
"""Of a block, forward and backward of a micro-batch, at the least: about a hundred kernels, launched at 5 to 10 us each."""
_HOST_BYTES = 25e9
"""Bytes/s of host memory that a rank's update gets: eight of them share two sockets' 400 to 600 GB/s, and reach half of it."""
_UPDATE_BYTES = 28
"""Of host memory a parameter: AdamW reads weight, gradient and two moments, and writes all but the gradient."""

_GB = 1e9
_LINKS: dict[str, tuple[float, float | None, float]] = {
    "B200": (900, 50, 64),
    "H200 NVL": (64, None, 64),
    "H200": (450, 50, 64),
    "H100 NVL": (64, None, 64),
    "H100 PCIe": (64, None, 64),
    "H100": (450, 50, 64),
    "A100": (300, 25, 32),
    "L40S": (32, None, 32),
    "A10": (32, None, 32),
    "L4": (32, None, 32),
}
"""GB/s of a GPU, one way: to the others of its node, its share of the network, to the host. NVIDIA's datasheets add up both ways.

NVLink through switches, else PCIe: a bridge between two cards does not carry a ring of eight. The network is that of NVIDIA's own
machines, DGX B200, H200 and H100 (400 Gb/s a GPU) and A100 (200 Gb/s); cards for PCIe come in any machine."""


@dataclass(frozen=True, slots=True)
class Device:
    """What a step is reckoned with: FLOP/s in half precision and in fp32, the share of it, and bytes/s one way, of one GPU.

    `network`: None where it is not known.
    """

    name: str
    half: float
    fp32: float
    efficiency: float
    node: float
    network: float | None
    host: float

    def but(self, efficiency: float | None, node_gb: float | None, network_gb: float | None) -> Device:
        """With what somebody knows better; links in GB/s."""
        return replace(
            self,
            efficiency=self.efficiency if efficiency is None else efficiency,
            node=self.node if node_gb is None else node_gb * _GB,
            network=self.network if network_gb is None else network_gb * _GB,
        )


NAMES = tuple(name.lower().replace(" ", "-") for name in PEAK_FLOPS)
"""As a user writes them."""


def find(name: str) -> Device | None:
    """A GPU by what a user, the driver or Ray calls it: `h100-pcie`, `NVIDIA H100 PCIe`, `H100`. None if no table has it."""
    known = dict(zip(NAMES, PEAK_FLOPS, strict=True)).get(name.lower()) or known_device(name)
    if known is None:
        return None
    node, network, host = _LINKS[known]
    if "pcie" in name.lower():
        node, network = host, None  # an A100 may be one: its name says so
    return Device(
        known,
        PEAK_FLOPS[known],
        PEAK_FP32[known],
        EFFICIENCY,
        node * _GB,
        None if network is None else network * _GB,
        host * _GB,
    )


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one strategy, in seconds a step; `communication` is that of all collectives, `exposed` what of it nothing runs beside."""

    compute: float
    communication: float
    exposed: float
    offload: float
    tokens_per_second: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute + self.exposed + self.offload


def refusal(spec: JobSpec, machine: Machine, device: Device) -> str | None:
    """Why a job's speed cannot be reckoned; None if it can be."""
    if spec.offload.optimizer == "nvme":
        return "the speed of the disk of offload.path is not known"
    if spec.offload.parameters == "cpu" and machine.ranks > 1:
        return "offload.parameters is not reckoned with"
    if device.network is None and machine.nodes > 1:
        return f"the network between nodes with {device.name} is not known: give --between-nodes GB/s"
    return None


def speed(
    strategy: str, spec: JobSpec, machine: Machine, model: Model, device: Device, flops_per_token: float
) -> Speed:
    """Of a strategy that trains the job, and for which there is no `refusal`. `flops_per_token`: the model's own count."""
    micro, count = batches(spec, machine.ranks)
    # Forward, and twice that backward; checkpointing computes blocks once more.
    forward, backward = 1 / 3, 2 / 3 + (1 / 3 if spec.train.checkpoint_activations == "full" else 0.0)
    peak = device.fp32 if spec.precision.params == "fp32" else device.half
    once = flops_per_token * micro * count * spec.model.context / (peak * device.efficiency)
    once = max(once, count * _LAUNCH_S * (1 + len({p.unit for p in model.params if p.unit != ROOT})))
    compute, ahead, last = once * (forward + backward), once * forward / count, once * backward / count
    shard = shard_of(strategy, spec, machine)
    sent = traffic(strategy, spec, machine, model)
    within, across = _links(machine.ranks if strategy == "ddp" else shard, machine, device)
    gathers, sums, between = sent.gathers / within, sent.sums / within, sent.across / across
    match strategy:
        case "ddp" | "zero1":
            exposed = max(0.0, sums - last) + max(0.0, gathers - ahead)
        case "zero2":
            exposed = max(0.0, sums - last * count) + max(0.0, gathers - ahead)
        case _:
            exposed = max(0.0, gathers + sums - compute) + max(0.0, between - last)
    offload = 0.0
    if spec.offload.optimizer == "cpu":
        values = sum(p.part(shard) for p in model.params if p.trained)
        way = 4 * values / device.host
        offload = max(0.0, way - last) + max(_UPDATE_BYTES * values / _HOST_BYTES, way)
    found = Speed(compute, gathers + sums + between, exposed, offload, 0.0)
    return replace(found, tokens_per_second=spec.train.global_batch * spec.model.context / found.seconds)


def _links(group: int, machine: Machine, device: Device) -> tuple[float, float]:
    """Bytes/s of a rank in a ring over a group of consecutive ranks, and in one over ranks that are so far apart.

    A ring over nodes leaves each of them once: it has the network of all its ranks there.
    """
    network = device.network or 0.0
    on_node = min(group, machine.per_node)
    within = device.node if group <= machine.per_node else min(device.node, network * on_node)
    apart = max(machine.per_node // group, 1)  # ranks of a node that are in one ring across
    across = device.node if machine.nodes == 1 else min(device.node, network * apart)
    return within, across
