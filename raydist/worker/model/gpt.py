"""A decoder-only transformer: the Llama architecture, and with `qk_norm` Qwen3's.

Runs in: each train worker, and in exports of weights. May not import ray.

RMSNorm, rotary positions, SwiGLU and grouped-query attention; no biases, no options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raydist.errors import UserError
from raydist.spec.decoder import check_heads, check_ranks
from raydist.worker.model._decoder import Decoder, built, dense_block

if TYPE_CHECKING:
    from raydist.spec import ModelSpec

NORM_EPS = 1e-5

check_spec = check_heads
check_tensor = check_ranks


def build(spec: ModelSpec, vocab_size: int) -> GPT:
    """The model with initial weights from torch's default generator; without weights if the default device is meta.

    Raises UserError on `model.options`.
    """
    if spec.options:
        raise UserError(
            f"model.options: gpt takes none, got {', '.join(sorted(spec.options))}",
            "remove them, or name your own model as package.module:build",
        )
    return built(lambda: GPT(spec, vocab_size))


build.takes_meta = True  # type: ignore[attr-defined]  # Decoder.init_module creates the weights


class GPT(Decoder):
    """A decoder of dense blocks."""

    def __init__(self, spec: ModelSpec, vocab_size: int) -> None:
        blocks = [dense_block(spec, NORM_EPS, qk_norm=spec.qk_norm) for _ in range(spec.layers)]
        super().__init__(spec, vocab_size, blocks, eps=NORM_EPS, rotary=spec.width // spec.heads)
