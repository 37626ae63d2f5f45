"""Mixtral: llama with experts in every block.

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
    """The options of mixtral."""

    num_local_experts: int = Field(8, ge=1, description="Experts of a layer.")


VARIANTS = {
    "window": {
        "kv_heads": 2,
        "tie_embeddings": False,
        "options": {"num_local_experts": 6, "num_experts_per_tok": 3, "balance_loss": 0.1, "sliding_window": 3},
    },
}
"""Fields of `model` that the contract's tests run, besides the defaults."""

check_tensor = check_ranks
check_context = check_sequence_ranks


def check_spec(spec: ModelSpec) -> None:
    """Raises SpecValueError for values that cannot be combined."""
    check_heads(spec, Options(**spec.options))
    if spec.qk_norm:
        raise problem("qk_norm", True, "mixtral does not normalise queries and keys", "set model.name: qwen_moe")
    check_experts(shape(spec), count="num_local_experts", chosen="num_experts_per_tok")


def experts(spec: ModelSpec) -> int:
    """Experts of a layer."""
    return shape(spec).count


def shape(spec: ModelSpec) -> Experts:
    """The feed-forward layer of these fields."""
    options = Options(**spec.options)
    return Experts(
        options.num_local_experts,
        options.num_experts_per_tok,
        spec.hidden or default_hidden(spec.width),
        balance=options.balance_loss,
    )


def dense(spec: ModelSpec) -> Dense:
    """All else of these fields."""
    options = Options(**spec.options)
    head = options.head_dim or spec.width // spec.heads
    return Dense(options.rms_norm_eps, head, (options.sliding_window,) * spec.layers, options.rope_scaling)


def shapes(spec: ModelSpec, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """See `HuggingFace.shapes`."""
    return with_experts(dense(spec).shapes(spec, vocab_size), spec.width, shape(spec), range(spec.layers))


def hf_fields(config: Config) -> dict[str, Any]:
    """See `HuggingFace.fields`."""
    if config.get("router_jitter_noise"):
        raise UserError(f"router_jitter_noise: {config['router_jitter_noise']} is not computed here", "only 0 is")
    config = {"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5, **config}
    fields = decoder_fields(config, Options()) | {"qk_norm": False}
    keys = ("num_local_experts", "num_experts_per_tok")
    fields["options"] |= {key: need(config, key) for key in keys}
    if config.get("sliding_window"):
        fields["options"]["sliding_window"] = config["sliding_window"]
    return fields


def hf_config(spec: ModelSpec) -> dict[str, Any]:
    """See `HuggingFace.config`."""
    options = Options(**spec.options)
    return {
        "model_type": "mixtral",
        **decoder_config(spec, options),
        "sliding_window": options.sliding_window,
        "num_local_experts": options.num_local_experts,
        "num_experts_per_tok": options.num_experts_per_tok,
        "output_router_logits": False,
    }


HUGGINGFACE = HuggingFace({"mixtral": "MixtralForCausalLM"}, hf_fields, hf_config, shapes, sparse_pieces({
    "mlp.router.weight": "block_sparse_moe.gate.weight",
    "mlp.experts.gate": "block_sparse_moe.experts.{}.w1.weight",
    "mlp.experts.up": "block_sparse_moe.experts.{}.w3.weight",
    "mlp.experts.down": "block_sparse_moe.experts.{}.w2.weight",
}))  # fmt: skip


def build(spec: ModelSpec, vocab_size: int) -> SparseDecoder:
    """See the contract in __init__.py."""
    return sparse_decoder(spec, vocab_size, dense(spec), shape(spec), range(spec.layers))


build.takes_meta = True  # type: ignore[attr-defined]  # Decoder.init_module creates the weights
