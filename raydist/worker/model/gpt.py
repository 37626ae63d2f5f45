"""A decoder-only transformer: the Llama architecture, and with `qk_norm` Qwen3's.

Runs in: each train worker, and in exports of weights. May not import ray.

RMSNorm, rotary positions, SwiGLU and grouped-query attention; no biases, no options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raydist.errors import UserError
from raydist.spec.decoder import DecoderOptions, Dense, check_heads, check_ranks, check_sequence_ranks
from raydist.spec.huggingface import HuggingFace, decoder_config
from raydist.worker.model._decoder import Decoder, dense_decoder

if TYPE_CHECKING:
    from raydist.spec import ModelSpec

NORM_EPS = 1e-5

check_spec = check_heads
check_tensor = check_ranks
check_context = check_sequence_ranks


def dense(spec: ModelSpec) -> Dense:
    """The decoder of these fields."""
    return Dense(NORM_EPS, spec.width // spec.heads, (None,) * spec.layers, qk_norm=spec.qk_norm)


def hf_config(spec: ModelSpec) -> dict[str, Any]:
    """See `HuggingFace.config`: Llama's, and with `qk_norm` Qwen3's."""
    config = {**decoder_config(spec, DecoderOptions(rms_norm_eps=NORM_EPS)), "attention_bias": False}
    if spec.qk_norm:
        return {"model_type": "qwen3", **config, "use_sliding_window": False}
    return {"model_type": "llama", **config, "mlp_bias": False}


HUGGINGFACE = HuggingFace({"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}, dict, hf_config, reads=False,
                          shapes=lambda spec, vocab_size: dense(spec).shapes(spec, vocab_size))  # fmt: skip


def build(spec: ModelSpec, vocab_size: int) -> Decoder:
    """The model with initial weights from torch's default generator; without weights if the default device is meta.

    Raises UserError on `model.options`.
    """
    if spec.options:
        raise UserError(
            f"model.options: gpt takes none, got {', '.join(sorted(spec.options))}",
            "remove them, or name your own model as package.module:build",
        )
    return dense_decoder(spec, vocab_size, dense(spec), GPT)


build.takes_meta = True  # type: ignore[attr-defined]  # Decoder.init_module creates the weights


class GPT(Decoder):
    """A decoder of dense blocks."""
