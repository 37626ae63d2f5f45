"""Qwen2-MoE, with a shared expert whose output is gated; with `qk_norm` Qwen3-MoE, without one.

Runs in: each train worker, and in exports of weights. May not import ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from raydist.errors import UserError
from raydist.spec.decoder import DecoderOptions, Dense, check_heads, check_ranks, check_sequence_ranks, default_hidden
from raydist.spec.experts import Experts, SparseOptions, check_experts, with_experts
from raydist.spec.huggingface import Config, HuggingFace, decoder_config, decoder_fields, need, sparse_pieces
from raydist.spec.parts import problem
from raydist.worker.model._sparse import SparseDecoder, sparse_decoder

if TYPE_CHECKING:
    from raydist.spec import ModelSpec


class Options(SparseOptions, DecoderOptions):
    """The options of qwen_moe."""

    rms_norm_eps: float = Field(1e-6, gt=0, description="Added to the mean square in each RMSNorm.")
    num_experts: int = Field(8, ge=1, description="Experts of a layer.")
    moe_intermediate_size: int | None = Field(
        None, ge=1, description="Width of an expert; default: that of a layer without experts (model.hidden)."
    )
    norm_topk_prob: bool = Field(False, description="The weights of a token's experts sum to 1.")
    shared_expert_intermediate_size: int | None = Field(
        None,
        ge=1,
        description="Width of the expert that all tokens take; default: moe_intermediate_size. Without qk_norm.",
    )
    decoder_sparse_step: int = Field(1, ge=1, description="Every so many-th layer has experts.")
    mlp_only_layers: tuple[int, ...] = Field((), description="Numbers of layers without experts; the first one is 0.")


VARIANTS = {
    "qwen3": {
        "qk_norm": True,
        "kv_heads": 2,
        "tie_embeddings": False,
        "options": {
            "head_dim": 12,
            "sliding_window": 3,
            "num_experts": 5,
            "moe_intermediate_size": 9,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
            "balance_loss": 0.1,
        },
    },
}
"""Fields of `model` that the contract's tests run, besides the defaults."""

check_tensor = check_ranks
check_context = check_sequence_ranks


def check_spec(spec: ModelSpec) -> None:
    """Raises SpecValueError for values that cannot be combined."""
    options = Options(**spec.options)
    check_heads(spec, options)
    if spec.qk_norm and options.shared_expert_intermediate_size:
        raise problem("options.shared_expert_intermediate_size", options.shared_expert_intermediate_size,
                      "has no effect with qk_norm: Qwen3-MoE has no shared expert", "remove one of both")  # fmt: skip
    check_experts(shape(spec), count="num_experts", chosen="num_experts_per_tok")
    for i in options.mlp_only_layers:
        if not 0 <= i < spec.layers:
            raise problem("options.mlp_only_layers", i, f"is not the number of one of the {spec.layers} layers",
                          f"take numbers from 0 to {spec.layers - 1}")  # fmt: skip
    if not sparse_layers(spec):
        field = "decoder_sparse_step" if options.decoder_sparse_step > spec.layers else "mlp_only_layers"
        raise problem(f"options.{field}", getattr(options, field), "leaves no layer with experts",
                      "set model.name: qwen, or change it")  # fmt: skip


def experts(spec: ModelSpec) -> int:
    """Experts of a layer."""
    return shape(spec).count


def shape(spec: ModelSpec) -> Experts:
    """The feed-forward layer with experts of these fields."""
    options = Options(**spec.options)
    hidden = options.moe_intermediate_size or spec.hidden or default_hidden(spec.width)
    return Experts(
        options.num_experts,
        options.num_experts_per_tok,
        hidden,
        normalise=options.norm_topk_prob,
        shared=0 if spec.qk_norm else options.shared_expert_intermediate_size or hidden,
        shared_gate=not spec.qk_norm,
        balance=options.balance_loss,
    )


def sparse_layers(spec: ModelSpec) -> list[int]:
    """The numbers of the blocks with experts."""
    options = Options(**spec.options)
    step = options.decoder_sparse_step
    return [i for i in range(step - 1, spec.layers, step) if i not in options.mlp_only_layers]


def dense(spec: ModelSpec) -> Dense:
    """All else of these fields."""
    options = Options(**spec.options)
    return Dense(
        options.rms_norm_eps,
        options.head_dim or spec.width // spec.heads,
        (options.sliding_window,) * spec.layers,
        options.rope_scaling,
        qk_norm=spec.qk_norm,
        qkv_bias=not spec.qk_norm,
    )


def shapes(spec: ModelSpec, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """See `HuggingFace.shapes`."""
    return with_experts(dense(spec).shapes(spec, vocab_size), spec.width, shape(spec), sparse_layers(spec))


def hf_fields(config: Config) -> dict[str, Any]:
    """See `HuggingFace.fields`."""
    qk_norm = config["model_type"] == "qwen3_moe"
    for key, computed in (("attention_bias", False),) if qk_norm else (("qkv_bias", True),):
        if config.get(key, computed) != computed:
            raise UserError(f"{key}: {config[key]!r} is not computed here", f"only {computed!r} is")
    config = {"num_key_value_heads": 4 if qk_norm else 16, "num_experts": config.get("num_local_experts"), **config}
    fields = decoder_fields(config, Options()) | {"qk_norm": qk_norm}
    keys = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    found = {key: need(config, key) for key in (*keys, *(() if qk_norm else ("shared_expert_intermediate_size",)))}
    found |= {
        key: config[key] for key in ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers") if config.get(key)
    }
    if config.get("use_sliding_window"):
        kinds = ["sliding_attention"] if qk_norm else config.get("layer_types") or []
        if set(kinds) != {"sliding_attention"}:
            raise UserError(
                f"layer_types: {kinds} with use_sliding_window is not computed here", "only a window in all layers is"
            )
        found["sliding_window"] = need(config, "sliding_window")
    fields["options"] |= found
    return fields


def hf_config(spec: ModelSpec) -> dict[str, Any]:
    """See `HuggingFace.config`: Qwen3-MoE's with `qk_norm`, else Qwen2-MoE's."""
    options, made = Options(**spec.options), shape(spec)
    config = {
        "model_type": "qwen3_moe" if spec.qk_norm else "qwen2_moe",
        **decoder_config(spec, options),
        "num_experts": made.count,
        "num_experts_per_tok": made.chosen,
        "moe_intermediate_size": made.hidden,
        "norm_topk_prob": made.normalise,
        "decoder_sparse_step": options.decoder_sparse_step,
        "mlp_only_layers": [*options.mlp_only_layers],
        "use_sliding_window": options.sliding_window is not None,
        "output_router_logits": False,
    }
    if options.sliding_window is not None:
        config["sliding_window"] = options.sliding_window
    if spec.qk_norm:
        return config | {"attention_bias": False}
    kind = "full_attention" if options.sliding_window is None else "sliding_attention"
    return config | {
        "shared_expert_intermediate_size": made.shared,
        "layer_types": [kind] * spec.layers,
        "qkv_bias": True,
    }


HUGGINGFACE = HuggingFace(
    {"qwen2_moe": "Qwen2MoeForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}, hf_fields, hf_config, shapes,
    sparse_pieces({
        "mlp.router.weight": "mlp.gate.weight",
        **{f"mlp.experts.{name}": f"mlp.experts.{{}}.{name}_proj.weight" for name in ("gate", "up", "down")},
        **{f"mlp.shared.{name}.weight": f"mlp.shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")},
        "mlp.shared_gate.weight": "mlp.shared_expert_gate.weight",
    }),
)  # fmt: skip


def build(spec: ModelSpec, vocab_size: int) -> SparseDecoder:
    """See the contract in __init__.py."""
    return sparse_decoder(spec, vocab_size, dense(spec), shape(spec), sparse_layers(spec))


build.takes_meta = True  # type: ignore[attr-defined]  # Decoder.init_module creates the weights
