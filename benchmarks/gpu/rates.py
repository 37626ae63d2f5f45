"""Rates of a device at the shapes of a GPT: matrix products and attention. `about`: layers, width, heads and context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from raydist.spec.decoder import default_hidden
from raydist.worker.metrics.device_clock import Marks


def timed(device: torch.device, function: Callable[[], object], repeat: int) -> float:
    """Seconds of one call."""
    for _ in range(3):
        function()
    marks = Marks(device)
    marks.mark()
    for _ in range(repeat):
        function()
    marks.mark()
    return marks.seconds()[0] / repeat


def matmul_rate(device: torch.device, about: dict[str, Any], vocab: int, tokens: int, repeat: int) -> float:
    """FLOP/s of a bf16 model's matrix products, forward and both of backward, weighted by their number in a step. On random
    numbers, because with zeros the chip runs faster."""
    width, hidden = about["width"], about.get("hidden") or default_hidden(about["width"])
    shapes = Counter({(width, width): 4 * about["layers"], (width, hidden): 2 * about["layers"]})
    shapes[hidden, width] += about["layers"]
    shapes[width, vocab] += 1
    work = seconds = 0.0
    for (into, out), count in shapes.items():
        n = min(tokens, (1 << 28) // vocab) if out == vocab else tokens
        x, w, g = (torch.randn(s, device=device, dtype=torch.bfloat16) for s in ((n, into), (out, into), (n, out)))
        for product in (lambda: x @ w.t(), lambda: g @ w, lambda: g.t() @ x):  # noqa: B023
            seconds += timed(device, product, repeat) * count * tokens / n
            work += 2.0 * tokens * into * out * count
    return work / seconds


def attention_rates(device: torch.device, about: dict[str, Any], batch: int, repeat: int) -> dict[str, float | None]:
    """FLOP/s of causal attention, forward and backward, by kernel. Counts the full products, as MFU does. None: not available."""
    shape = (batch, about["heads"], about["context"], about["width"] // about["heads"])
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    above = torch.randn(shape, device=device, dtype=torch.bfloat16)

    def once() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(above)

    work = 12.0 * shape[0] * shape[1] * shape[2] ** 2 * shape[3]
    found: dict[str, float | None] = {"torch's choice": work / timed(device, once, repeat)}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        try:
            with sdpa_kernel(backend):
                found[backend.name] = work / timed(device, once, repeat)
        except RuntimeError:
            found[backend.name] = None
    return found
