"""Tiny random models of `transformers` and the same ones here, with the same weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from raydist import registry
from raydist.spec import ModelSpec
from raydist.spec.huggingface import HuggingFace, format_of, reader_of

VOCAB, CONTEXT = 37, 24

TINY = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 12}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 6}
MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
DEEPSEEK = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rms_norm_eps": 1e-5},
    "llama, tied, heads of another size": {"model_type": "llama", "tie_word_embeddings": True, "head_dim": 12},
    "llama, biases, one key head": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 1,
    },
    "llama 3": {"model_type": "llama", "rope_parameters": LLAMA3},
    "llama, linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    },
    "llama, dynamic": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.5, "rope_theta": 1e4},
    },
    "mistral": {"model_type": "mistral", "sliding_window": 5},
    "mistral without a window": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "rope_parameters": YARN},
    "qwen2, window from the second layer": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "qwen3, yarn": {
        "model_type": "qwen3",
        "head_dim": 8,
        "rope_parameters": {**YARN, "truncate": False, "beta_fast": 4.0},
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral, window": {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 5},
    "qwen2_moe": {"model_type": "qwen2_moe", **MOE, "shared_expert_intermediate_size": 28, "decoder_sparse_step": 2},
    "qwen3_moe": {"model_type": "qwen3_moe", **MOE, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "deepseek_v3": {
        **DEEPSEEK,
        "model_type": "deepseek_v3",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    },
    "deepseek_v3, yarn, no latent of queries": {
        **DEEPSEEK,
        "model_type": "deepseek_v3",
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "norm_topk_prob": False,
        "rope_interleave": False,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
    },
    "deepseek_v2": {**DEEPSEEK, "model_type": "deepseek_v2", "q_lora_rank": None, "n_shared_experts": 2},
    "deepseek_v2, groups, yarn": {
        **DEEPSEEK,
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 16.0,
        "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
}
SPARSE = [name for name, fields in FAMILIES.items() if "num_experts_per_tok" in fields]
"""Those with experts."""


def of_config(config: dict[str, Any]) -> transformers.PreTrainedModel:
    """The model of `transformers` for a config.json, with its plainest experts."""
    made = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config), experts_implementation="eager"
    )
    return made.eval()  # type: ignore[no-any-return]


def theirs(name: str, seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
    """A model of `transformers` whose weights are all random: gains and biases, too. `changes`: of its config."""
    model = of_config({**TINY, **FAMILIES[name], **changes})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter, p in model.named_parameters():
            if "norm" in parameter:
                p.uniform_(0.5, 1.5, generator=generator)
            else:
                p.normal_(0.0, 0.1, generator=generator)
        for buffer, b in model.named_buffers():
            if "correction" in buffer:
                b.normal_(0.0, 0.1, generator=generator)
    return model


def spec_of(config: dict[str, Any]) -> tuple[ModelSpec, HuggingFace]:
    """The model that reads a config.json."""
    name, format = reader_of(config)
    return ModelSpec(name=name, **format.fields(config)), format


def ours(model: transformers.PreTrainedModel, **fields: Any) -> nn.Module:
    """The same model here, from its config.json and its tensors. `fields`: of `model`, that are others."""
    spec = spec_of(model.config.to_dict())[0].model_copy(update=fields)
    made: nn.Module = registry.load("model", spec.name)(spec, VOCAB).eval()
    with torch.no_grad():
        tensors, held = renamed(weights(model), made), persistent(made)
        for name, tensor in tensors.items():
            held[name].copy_(tensor)
    return made


def persistent(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, a tied one once."""
    kept = model.state_dict()
    return {**dict(model.named_parameters()), **{name: b for name, b in model.named_buffers() if name in kept}}


def weights(model: transformers.PreTrainedModel) -> dict[str, Tensor]:
    """Its tensors as it would write them to files."""
    return revert_weight_conversion(model, {name: t.detach() for name, t in persistent(model).items()})


def gradients(model: transformers.PreTrainedModel) -> dict[str, Tensor]:
    """Its gradients, under the names of the parameters in files."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return revert_weight_conversion(model, found)


def renamed(tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Tensors, or gradients, by their names in files, under our names. All must be used."""
    format = format_of(model.spec.name)  # type: ignore[union-attr, arg-type]
    assert format is not None
    made, left = {}, set(tensors)
    for name, p in persistent(model).items():
        whole = torch.empty_like(p)
        for piece in format.pieces(name, tuple(p.shape)):
            if piece.name not in left:
                break
            whole[piece.at] = tensors[piece.name]
            left.remove(piece.name)
        else:
            made[name] = whole
    assert not left, left
    return made
