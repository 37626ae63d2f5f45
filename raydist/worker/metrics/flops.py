"""Training FLOPs per token, and model FLOPs utilisation (MFU): their share of the peak of the GPUs.

Runs in: each train worker; plain python except for the sums over a module's parameters. May not import ray.

The count follows torchtitan: 6 per weight (2 forward, 4 backward; of a frozen weight 2) plus the two products of attention, with
causal ones counted whole. Recomputation by activation checkpointing does not count. Derivation: PaLM (arXiv 2204.02311,
appendix B).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

PEAK_FLOPS: dict[str, float] = {
    "B200": 2.25e15,
    "H200 NVL": 836e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10": 125e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
    "RTX 4090": 165.2e12,
    "MI300X": 1307.4e12,
}
"""Dense bf16 tensor-core FLOP/s by the words of a device name; the first entry whose words all occur matches. V100, T4: fp16,
because they have no bf16.

NVIDIA's data sheets give the figure with 2:4 sparsity, which training does not use: half of it is here. The tables of torchtitan
and nanochat agree for the GPUs that they have. RTX 4090: Ada white paper, with fp32 accumulation. MI300X: AMD's data sheet. For a
GPU that is not here no MFU is shown.
"""

PEAK_FP32: dict[str, float] = {
    "B200": 75e12,
    "H200 NVL": 60e12,
    "H200": 67e12,
    "H100 NVL": 60e12,
    "H100 PCIe": 51e12,
    "H100": 67e12,
    "A100": 19.5e12,
    "L40S": 91.6e12,
    "A10": 31.2e12,
    "L4": 30.3e12,
    "V100": 15.7e12,
    "T4": 8.1e12,
    "RTX 4090": 82.6e12,
    "MI300X": 163.4e12,
}
"""The same in fp32, from the same data sheets: without tensor cores, because torch does not use TF32 by default."""


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
    """The entry of the tables for a device's name, as the GPU driver reports it; None if there is no entry."""
    words = set(device_name.replace("-", " ").split())
    if not words.isdisjoint({"MIG", "Laptop", "D"}):
        return None  # a slice of a GPU, or a slower variant, also has the GPU's name
    return next((name for name in PEAK_FLOPS if set(name.split()) <= words), None)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device, by its name as the GPU driver reports it; None if it is not in the table."""
    name = known_device(device_name)
    return None if name is None else PEAK_FLOPS[name]


def mfu(tokens_per_second: float, flops_per_token: float, device_name: str, devices: int) -> float | None:
    """Model FLOPs utilisation, 0 to 1, of a job that processes `tokens_per_second` on all its `devices` GPUs together.

    None on a device whose peak is unknown.
    """
    peak = peak_flops(device_name)
    if peak is None:
        return None
    return tokens_per_second * flops_per_token / (peak * devices)
