"""Llama 2 and 3, and Mistral with its sliding window.

Runs in: each train worker, and in exports of weights. May not import ray.

The architecture of gpt with the choices that released models make: eps, size of a head, scaled rotary positions, a window, biases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from raydist.spec.decoder import DecoderOptions, Dense, check_heads, check_ranks, check_sequence_ranks
from raydist.spec.huggingface import Config, HuggingFace, decoder_config, decoder_fields
from raydist.spec.parts import problem
from raydist.worker.model._decoder import Decoder, dense_decoder

if TYPE_CHECKING:
    from raydist.spec import ModelSpec


class Options(DecoderOptions):
    """The options of llama."""

    attention_bias: bool = Field(False, description="Biases of queries, keys, values and the output of attention.")
    mlp_bias: bool = Field(False, description="Biases of the feed-forward layers.")


VARIANTS = {
    "mistral": {"kv_heads": 2, "tie_embeddings": False, "options": {"sliding_window": 3, "head_dim": 12}},
    "biases": {"options": {"attention_bias": True, "mlp_bias": True}},
}
"""Fields of `model` that the contract's tests run, besides the defaults."""

check_tensor = check_ranks
check_context = check_sequence_ranks


def check_spec(spec: ModelSpec) -> None:
    """Raises SpecValueError for values that cannot be combined."""
    check_heads(spec, Options(**spec.options))
    if spec.qk_norm:
        raise problem("qk_norm", True, "llama does not normalise queries and keys", "set model.name: qwen")


def dense(spec: ModelSpec) -> Dense:
    """The decoder of these fields."""
    options = Options(**spec.options)
    return Dense(
        options.rms_norm_eps,
        options.head_dim or spec.width // spec.heads,
        (options.sliding_window,) * spec.layers,
        options.rope_scaling,
        qkv_bias=options.attention_bias,
        out_bias=options.attention_bias,
        mlp_bias=options.mlp_bias,
    )


def hf_fields(config: Config) -> dict[str, Any]:
    """See `HuggingFace.fields`."""
    keys: tuple[str, ...] = ("attention_bias", "mlp_bias")
    if config["model_type"] == "mistral":
        config, keys = {"num_key_value_heads": 8, "sliding_window": 4096, **config}, ("sliding_window",)
    fields = decoder_fields(config, Options()) | {"qk_norm": False}
    fields["options"] |= {key: config[key] for key in keys if config.get(key)}
    return fields


def hf_config(spec: ModelSpec) -> dict[str, Any]:
    """See `HuggingFace.config`: Mistral's with a window, else Llama's."""
    options = Options(**spec.options)
    config = decoder_config(spec, options)
    if options.sliding_window is None:
        return {"model_type": "llama", **config, "attention_bias": options.attention_bias, "mlp_bias": options.mlp_bias}
    return {"model_type": "mistral", **config, "sliding_window": options.sliding_window}


HUGGINGFACE = HuggingFace({"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}, hf_fields, hf_config,
                          shapes=lambda spec, vocab_size: dense(spec).shapes(spec, vocab_size))  # fmt: skip


def build(spec: ModelSpec, vocab_size: int) -> Decoder:
    """See the contract in __init__.py."""
    return dense_decoder(spec, vocab_size, dense(spec))


build.takes_meta = True  # type: ignore[attr-defined]  # Decoder.init_module creates the weights
