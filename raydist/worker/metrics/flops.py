"""FLOPs of a token, and the share of a GPU's peak that they are (MFU).

Runs in: each train worker; plain python but for the sums over a module's parameters. May not import ray.

The count is torchtitan's: 6 a weight (2 forward, 4 backward) and attention's two products, causal ones counted
whole; what activation checkpointing computes again does not count. PaLM (arXiv 2204.02311, appendix B) has the
reasoning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

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
"""Dense bf16 tensor-core FLOP/s by the words of a device name; the first entry whose words all occur is it. V100, T4: fp16, for
they have no bf16.

NVIDIA's datasheets print the figure with 2:4 sparsity, which no training here has: half of it. Where torchtitan's and
nanochat's tables have the GPU too, they agree. RTX 4090: Ada's white paper, with sums in fp32. MI300X: AMD's data sheet. A GPU
that is not here gets no MFU rather than a guess.
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
"""The same in fp32, from the same datasheets: without tensor cores, for torch does not round to TF32 unless it is asked to."""


def decoder_flops(parameters: int, layers: int, heads: int, qk: int, v: int, context: int) -> float:
    """Training FLOPs of one token of a transformer decoder.

    `parameters`: those in matrix products, so without the embedding unless it is the output head too. `qk` and `v`:
    sizes of a head's queries and values. 6 N + 6 L H (d_qk + d_v) T.
    """
    return 6.0 * parameters + 6.0 * layers * heads * (qk + v) * context


def flops_per_token(model: nn.Module, context: int) -> float:
    """Training FLOPs of one token in sequences of `context`.

    The model's own count, else 6 for each parameter that is no embedding; a tied one counts, as the head. Parameters are
    counted as they are: call it before the model is sharded.
    """
    own = getattr(model, "flops_per_token", None)
    if own is not None:
        return float(own(context))
    from torch import nn

    parameters = {id(p): p.numel() for p in model.parameters()}
    heads = {id(p) for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters(recurse=False)}
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} - heads
    return 6.0 * sum(n for i, n in parameters.items() if i not in embeddings)


def known_device(device_name: str) -> str | None:
    """The entry of the tables for a device's name, as the driver gives it; None for one that is not there."""
    words = set(device_name.replace("-", " ").split())
    if not words.isdisjoint({"MIG", "Laptop", "D"}):
        return None  # a slice of a GPU carries the GPU's name, and so do slower ones
    return next((name for name in PEAK_FLOPS if set(name.split()) <= words), None)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device, by its name as the driver gives it; None for one that is not in the table."""
    name = known_device(device_name)
    return None if name is None else PEAK_FLOPS[name]


def mfu(tokens_per_second: float, flops_per_token: float, device_name: str, devices: int) -> float | None:
    """Model FLOPs utilisation, 0 to 1, of a job that does so many tokens a second on all its `devices` GPUs together.

    None on a device whose peak is unknown.
    """
    peak = peak_flops(device_name)
    if peak is None:
        return None
    return tokens_per_second * flops_per_token / (peak * devices)
