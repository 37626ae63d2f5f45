"""Training FLOPs per token, and model FLOPs utilisation (MFU): their share of the peak of the GPUs.

Runs in: each train worker; plain python except for the sums over a module's parameters. May not import ray.

The count follows torchtitan: 6 per weight (2 forward, 4 backward; of a frozen weight 2) plus the two products of attention, with
causal ones counted whole. Recomputation by activation checkpointing does not count. Derivation: PaLM (arXiv 2204.02311,
appendix B).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn


class Gpu(NamedTuple):
    """Of one GPU: FLOP/s, and GB/s one way.

    `half`: dense bf16 on tensor cores, fp16 where it has no bf16 (V100, T4). `fp32`: without tensor cores, because torch does not
    use TF32 by default. `node`: to the others of its node; `network`: its share of the network, None if unknown; `host`: to the
    host. `memory`: GB as they are sold -> GiB as torch counts them (`total_memory`, "total capacity" in its messages).
    """

    half: float
    fp32: float
    node: float
    network: float | None
    host: float
    memory: Mapping[int, float]


GPUS: dict[str, Gpu] = {
    "B200": Gpu(2.25e15, 75e12, 900, 50, 64, {180: 178.3}),
    "H200 NVL": Gpu(836e12, 60e12, 64, None, 64, {141: 139.8}),
    "H200": Gpu(989e12, 67e12, 450, 50, 64, {141: 139.8}),
    "H100 NVL": Gpu(835e12, 60e12, 64, None, 64, {94: 93.0}),
    "H100 PCIe": Gpu(756e12, 51e12, 64, None, 64, {80: 79.1}),
    "H100": Gpu(989e12, 67e12, 450, 50, 64, {80: 79.1}),
    "A100": Gpu(312e12, 19.5e12, 300, 25, 32, {80: 79.1, 40: 39.4}),
    "L40S": Gpu(362e12, 91.6e12, 32, None, 32, {48: 44.4}),
    "A10": Gpu(125e12, 31.2e12, 32, None, 32, {24: 22.0}),
    "L4": Gpu(121e12, 30.3e12, 32, None, 32, {24: 22.0}),
    "V100": Gpu(125e12, 15.7e12, 150, 6.25, 16, {16: 15.7, 32: 31.7}),
    "T4": Gpu(65e12, 8.1e12, 16, None, 16, {16: 14.5}),
    "RTX 4090": Gpu(165.2e12, 82.6e12, 32, None, 32, {24: 23.6}),
    "MI300X": Gpu(1307.4e12, 163.4e12, 448, None, 64, {192: 191.6}),
}
"""By the words of a device name; the first entry whose words all occur matches. For a GPU that is not here no MFU is shown.

FLOP/s: NVIDIA's data sheets give the figure with 2:4 sparsity, which training does not use: half of it is here. The tables of
torchtitan and nanochat agree for the GPUs that they have. RTX 4090: Ada white paper, with fp32 accumulation. MI300X: AMD's data
sheet.

GB/s: NVIDIA's datasheets add up both ways. NVLink through switches, else PCIe: a bridge between two cards does not carry a ring of
eight. The network is that of NVIDIA's own machines, DGX B200, H200 and H100 (400 Gb/s a GPU), A100 (200 Gb/s) and DGX-1 and DGX-2
with V100 (50 Gb/s); cards for PCIe come in any machine, and MI300X in those of several makers. MI300X: seven links of 64 GB/s,
AMD's data sheet.

Memory: the first size, where a name does not say it. About the least that drivers of the last years leave: error correction and the
driver keep the rest.
"""


def attention_flops(heads: int, qk: int, v: int, tokens: int) -> float:
    """Training FLOPs of one token in the products of queries, keys and values of a layer: 6 H (d_qk + d_v) T.

    `qk` and `v`: sizes of a head's queries and values. `tokens`: those that a token attends to, the causal half not subtracted.
    """
    return 6.0 * heads * (qk + v) * tokens


def flops_of(parameter: Tensor) -> float:
    """Training FLOPs of one token in a product with this matrix: 6 for each weight, 4 if it is frozen and needs no gradient."""
    return (6.0 if parameter.requires_grad else 4.0) * parameter.numel()


def flops_per_token(model: nn.Module, context: int) -> float:
    """Training FLOPs of one token in sequences of `context`.

    The model's own count, else 6 for each parameter outside of embeddings; a tied embedding counts, as the head. Call it before the
    model is sharded: it counts the parameters as they are.
    """
    own = getattr(model, "flops_per_token", None)
    if own is not None:
        return float(own(context))
    from torch import nn

    parameters = {id(p): flops_of(p) for p in model.parameters()}
    heads = {id(p) for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters(recurse=False)}
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} - heads
    return sum(n for i, n in parameters.items() if i not in embeddings)


def known_device(device_name: str) -> str | None:
    """The entry of GPUS for a device's name, as the GPU driver reports it; None if there is no entry."""
    words = set(device_name.replace("-", " ").split())
    if not words.isdisjoint({"MIG", "Laptop", "D"}):
        return None  # a slice of a GPU, or a slower variant, also has the GPU's name
    return next((name for name in GPUS if set(name.split()) <= words), None)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device, by its name as the GPU driver reports it; None if it is not in GPUS."""
    name = known_device(device_name)
    return None if name is None else GPUS[name].half


def mfu(tokens_per_second: float, flops_per_token: float, device_name: str, devices: int) -> float | None:
    """Model FLOPs utilisation, 0 to 1, of a job that processes `tokens_per_second` on all its `devices` GPUs together.

    None on a device whose peak is unknown.
    """
    peak = peak_flops(device_name)
    if peak is None:
        return None
    return tokens_per_second * flops_per_token / (peak * devices)
