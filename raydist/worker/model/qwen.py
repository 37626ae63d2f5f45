"""Qwen2 with its biases of queries, keys and values; with `qk_norm` Qwen3.

Runs in: each train worker, and in exports of weights. May not import ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from raydist.errors import UserError
from raydist.spec.decoder import DecoderOptions, Dense, check_heads, check_ranks, check_sequence_ranks
from raydist.spec.huggingface import Config, HuggingFace, decoder_config, decoder_fields, need
from raydist.spec.parts import problem
from raydist.worker.model._decoder import Decoder, dense_decoder

if TYPE_CHECKING:
    from raydist.spec import ModelSpec


class Options(DecoderOptions):
    """The options of qwen."""

    rms_norm_eps: float = Field(1e-6, gt=0, description="Added to the mean square in each RMSNorm.")
    max_window_layers: int = Field(
        0, ge=0, description="So many layers, the first ones, attend to all tokens in spite of sliding_window."
    )


VARIANTS = {
    "qwen3": {"qk_norm": True, "kv_heads": 2, "options": {"head_dim": 12, "sliding_window": 3, "max_window_layers": 1}},
}
"""Fields of `model` that the contract's tests run, besides the defaults."""

check_tensor = check_ranks
check_context = check_sequence_ranks


def check_spec(spec: ModelSpec) -> None:
    """Raises SpecValueError for values that cannot be combined."""
    options = Options(**spec.options)
    check_heads(spec, options)
    if options.max_window_layers and options.sliding_window is None:
        raise problem("options.max_window_layers", options.max_window_layers, "has no effect without sliding_window",
                      "remove it, or set sliding_window")  # fmt: skip


def dense(spec: ModelSpec) -> Dense:
    """The decoder of these fields."""
    options = Options(**spec.options)
    full = min(options.max_window_layers, spec.layers)
    return Dense(
        options.rms_norm_eps,
        options.head_dim or spec.width // spec.heads,
        (None,) * full + (options.sliding_window,) * (spec.layers - full),
        options.rope_scaling,
        qk_norm=spec.qk_norm,
        qkv_bias=not spec.qk_norm,
    )


def hf_fields(config: Config) -> dict[str, Any]:
    """See `HuggingFace.fields`."""
    qk_norm = config["model_type"] == "qwen3"
    config = {"num_key_value_heads": 32, **({"head_dim": 128} if qk_norm else {}), **config}
    fields = decoder_fields(config, Options()) | {"qk_norm": qk_norm}
    if config.get("attention_bias"):
        raise UserError("attention_bias: True is not computed here", "only False is")
    layers = fields["layers"]
    full = config.get("max_window_layers", 28) if config.get("use_sliding_window") else layers
    if (kinds := config.get("layer_types")) is not None:
        full = kinds.count("full_attention") if isinstance(kinds, list) else 0
        if kinds != ["full_attention"] * full + ["sliding_attention"] * (layers - full):
            raise UserError(f"layer_types: {kinds} is not computed here", "only full attention first, then sliding")
    if full < layers:
        fields["options"] |= {"sliding_window": need(config, "sliding_window")} | (
            {"max_window_layers": full} if full else {}
        )
    return fields


def hf_config(spec: ModelSpec) -> dict[str, Any]:
    """See `HuggingFace.config`: Qwen3's with `qk_norm`, else Qwen2's."""
    options = Options(**spec.options)
    config = {
        "model_type": "qwen3" if spec.qk_norm else "qwen2",
        **decoder_config(spec, options),
        "use_sliding_window": options.sliding_window is not None,
    }
    if spec.qk_norm:
        config["attention_bias"] = False
    if options.sliding_window is not None:
        config |= {"sliding_window": options.sliding_window, "max_window_layers": options.max_window_layers}
    return config


HUGGINGFACE = HuggingFace({"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}, hf_fields, hf_config,
                          shapes=lambda spec, vocab_size: dense(spec).shapes(spec, vocab_size))  # fmt: skip


def build(spec: ModelSpec, vocab_size: int) -> Decoder:
    """See the contract in __init__.py."""
    return dense_decoder(spec, vocab_size, dense(spec))


build.takes_meta = True  # type: ignore[attr-defined]  # Decoder.init_module creates the weights
