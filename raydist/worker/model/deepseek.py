"""DeepSeek-V2 and V3 (R1): latent attention, experts in groups with shared ones, multi-token prediction.

Runs in: each train worker, and in exports of weights. May not import ray. Sources: arXiv 2405.04434 (V2), 2412.19437 (V3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from raydist.data.batches import MASKED
from raydist.errors import UserError
from raydist.spec.decoder import (
    DecoderOptions,
    Dense,
    RopeScaling,
    check_ranks,
    check_scaling,
    check_sequence_ranks,
    default_hidden,
)
from raydist.spec.experts import Experts, SparseOptions, check_experts, with_experts
from raydist.spec.huggingface import Config, HuggingFace, Piece, decoder_config, decoder_fields, need, sparse_pieces
from raydist.spec.latent_attention import LatentShape
from raydist.spec.parts import near_divisors, problem
from raydist.worker.metrics.flops import flops_of
from raydist.worker.model._decoder import built
from raydist.worker.model._latent_attention import LatentAttention
from raydist.worker.model._layers import Block, RMSNorm, SwiGLU
from raydist.worker.model._moe import MixtureOfExperts
from raydist.worker.model._rotary import packed_positions, yarn_mscale
from raydist.worker.model._sparse import SparseDecoder

if TYPE_CHECKING:
    from raydist.spec import ModelSpec


class Options(SparseOptions):
    """The options of deepseek."""

    rms_norm_eps: float = Field(
        1e-6, gt=0, description="Added to the mean square in each RMSNorm, but those of latents."
    )
    rope_scaling: RopeScaling | None = Field(None, description="Rotary frequencies for a longer context.")
    rope_interleave: bool = Field(
        True, description="Pairs of neighbours are rotated, else the halves of a head's part."
    )
    q_lora_rank: int | None = Field(None, ge=1, description="Size of the latent of queries; default: without one.")
    kv_lora_rank: int | None = Field(
        None, ge=1, description="Size of the latent of keys and values; default: 4 qk_nope_head_dim."
    )
    qk_nope_head_dim: int | None = Field(
        None, ge=1, description="Part of a head's queries and keys without position; default: width / heads."
    )
    qk_rope_head_dim: int | None = Field(
        None, ge=2, description="Part of them that is rotated; default: half of qk_nope_head_dim."
    )
    v_head_dim: int | None = Field(None, ge=1, description="Size of a head's values; default: qk_nope_head_dim.")
    n_routed_experts: int = Field(8, ge=1, description="Experts of a layer.")
    n_shared_experts: int = Field(1, ge=1, description="Experts that all tokens take; computed as one of their width.")
    moe_intermediate_size: int | None = Field(
        None, ge=1, description="Width of an expert; default: that of a layer without experts (model.hidden)."
    )
    first_k_dense_replace: int = Field(1, ge=0, description="So many layers, the first ones, have no experts.")
    topk_method: Literal["noaux_tc", "greedy", "group_limited_greedy"] = Field(
        "noaux_tc",
        description="How experts are chosen: noaux_tc (V3) by the sigmoid of the router's logits plus a bias, in the groups whose "
        "two best have the largest sum; greedy (V2) by their softmax; group_limited_greedy (V2) in the groups of the best experts.",
    )
    n_group: int = Field(1, ge=1, description="Groups of experts.")
    topk_group: int = Field(1, ge=1, description="Groups that a token's experts may be of.")
    norm_topk_prob: bool = Field(True, description="noaux_tc: the weights of a token's experts sum to 1.")
    routed_scaling_factor: float = Field(1.0, gt=0, description="What these weights are multiplied by.")
    bias_rate: float = Field(
        0.001, ge=0, description="noaux_tc: what a step adds to the bias of experts with less than the mean load."
    )
    num_nextn_predict_layers: int = Field(
        0, ge=0, description="Further tokens that a training pass predicts, each with one more block."
    )
    mtp_weight: float = Field(0.3, gt=0, description="Weight of the mean of these losses beside the next token's.")


VARIANTS = {
    "v3": {
        "tie_embeddings": False,
        "options": {"q_lora_rank": 12, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 12, "routed_scaling_factor": 2.5,
                    "balance_loss": 0.1, "num_nextn_predict_layers": 2},
    },
    "v2": {
        "tie_embeddings": False,
        "options": {"v_head_dim": 6, "n_routed_experts": 6, "n_shared_experts": 2, "moe_intermediate_size": 9,
                    "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1, "first_k_dense_replace": 0},
    },
}  # fmt: skip
"""Fields of `model` that the contract's tests run, besides the defaults."""

check_tensor = check_ranks


def check_context(spec: ModelSpec, tensor: int, context: int) -> None:
    """See the contract in __init__.py."""
    check_sequence_ranks(spec, tensor, context)
    if ahead := Options(**spec.options).num_nextn_predict_layers:
        raise problem("options.num_nextn_predict_layers", ahead,
                      "reads tokens of the rank after, which parallel.context does not send",
                      "set it to 0, or parallel.context: 1")  # fmt: skip


def check_spec(spec: ModelSpec) -> None:
    """Raises SpecValueError for values that cannot be combined."""
    options = Options(**spec.options)
    if spec.qk_norm:
        raise problem("qk_norm", True, "deepseek normalises latents, not queries and keys", "leave it out")
    if spec.kv_heads not in (None, spec.heads):
        raise problem(
            "kv_heads", spec.kv_heads, "is not heads: deepseek has a key and a value for each head", "leave it out"
        )
    if options.qk_nope_head_dim is None and spec.width % spec.heads:
        raise problem("heads", spec.heads, f"does not divide width {spec.width}", near_divisors(spec.width, spec.heads))
    if (rope := latent(spec).rope) % 2:
        raise problem("options.qk_rope_head_dim", rope, "is odd", "rotary positions need an even size")
    check_scaling(options.rope_scaling, rope)
    if options.first_k_dense_replace >= spec.layers:
        raise problem("options.first_k_dense_replace", options.first_k_dense_replace, "leaves no layer with experts",
                      f"set it below layers: {spec.layers}")  # fmt: skip
    unused = {"noaux_tc": (), "greedy": ("norm_topk_prob", "bias_rate", "n_group", "topk_group")}
    for field in unused.get(options.topk_method, ("norm_topk_prob", "bias_rate")):
        if field in options.model_fields_set:
            raise problem(f"options.{field}", getattr(options, field), f"has no effect with topk_method: {options.topk_method}",
                          "remove it")  # fmt: skip
    check_experts(
        shape(spec), count="n_routed_experts", chosen="num_experts_per_tok", groups="n_group", top_groups="topk_group"
    )


def experts(spec: ModelSpec) -> int:
    """Experts of a layer."""
    return shape(spec).count


def shape(spec: ModelSpec) -> Experts:
    """The feed-forward layer with experts of these fields."""
    options = Options(**spec.options)
    hidden = options.moe_intermediate_size or spec.hidden or default_hidden(spec.width)
    newer = options.topk_method == "noaux_tc"
    return Experts(
        options.n_routed_experts,
        options.num_experts_per_tok,
        hidden,
        score="sigmoid" if newer else "softmax",
        normalise=newer and options.norm_topk_prob,
        scale=options.routed_scaling_factor,
        groups=options.n_group,
        top_groups=options.topk_group,
        group_score="two best" if newer else "best",
        shared=options.n_shared_experts * hidden,
        bias=newer,
        bias_rate=options.bias_rate,
        balance=options.balance_loss,
    )


def latent(spec: ModelSpec) -> LatentShape:
    """The attention of these fields."""
    options = Options(**spec.options)
    nope = options.qk_nope_head_dim or spec.width // spec.heads
    return LatentShape(
        spec.heads,
        nope,
        options.qk_rope_head_dim or 2 * -(-nope // 4),
        options.v_head_dim or nope,
        options.kv_lora_rank or 4 * nope,
        options.q_lora_rank,
        options.rope_interleave,
    )


def shapes(spec: ModelSpec, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """See `HuggingFace.shapes`."""
    options, width = Options(**spec.options), spec.width
    further = range(spec.layers, spec.layers + options.num_nextn_predict_layers)
    plain = Dense(options.rms_norm_eps, 1, ()).shapes(spec.model_copy(update={"layers": further.stop}), vocab_size)
    made = {name: of for name, of in plain.items() if ".attention." not in name}
    for i in range(further.stop):
        made |= {f"blocks.{i}.attention.{name}": of for name, of in latent(spec).shapes(width).items()}
    made = with_experts(made, width, shape(spec), range(options.first_k_dense_replace, further.stop))
    for i in further:
        block, place = f"blocks.{i}.", f"mtp.{i}."
        made = {name.replace(block, f"{place}block."): of for name, of in made.items()}
        made |= {f"{place}{name}.weight": (width,) for name in ("embedding_norm", "hidden_norm", "norm")}
        made[f"{place}project.weight"] = (width, 2 * width)
    return made


_SAME = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts",
         "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace")  # fmt: skip
"""Options that every config.json has."""


def hf_fields(config: Config) -> dict[str, Any]:
    """See `HuggingFace.fields`."""
    newer = config["model_type"] == "deepseek_v3"
    scaled = {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4} if newer else {"routed_scaling_factor": 1.0}
    config = {"q_lora_rank": 1536, "first_k_dense_replace": 3 if newer else 0, **scaled, **config}
    method = config.get("topk_method", "noaux_tc" if newer else "greedy")
    for key, computed in (
        ("attention_bias", False),
        ("mlp_bias", False),
        ("moe_layer_freq", 1),
        ("topk_method", "noaux_tc" if newer else method),
        ("scoring_func", "sigmoid" if newer else "softmax"),
        *(() if newer else (("norm_topk_prob", False),)),
    ):
        if config.get(key, computed) != computed:
            raise UserError(f"{key}: {config[key]!r} is not computed here", f"only {computed!r} is")
    fields = decoder_fields({k: v for k, v in config.items() if k != "head_dim"}, DecoderOptions(rms_norm_eps=1e-6))
    found = {key: config["q_lora_rank"] if key == "q_lora_rank" else need(config, key) for key in _SAME}
    found |= {"routed_scaling_factor": config["routed_scaling_factor"], "topk_method": method}
    if newer:
        # The bias of a trained model is kept, unless the job says otherwise.
        found |= {"norm_topk_prob": config.get("norm_topk_prob", True), "bias_rate": 0.0}
        found["rope_interleave"] = config.get("rope_interleave", True)
    if method != "greedy":
        found |= {"n_group": config.get("n_group") or 1, "topk_group": config.get("topk_group") or 1}
    fields["options"] |= found
    return fields | {"qk_norm": False}


def hf_config(spec: ModelSpec) -> dict[str, Any]:
    """See `HuggingFace.config`: V3's with topk_method noaux_tc, else V2's."""
    options, made, attention = Options(**spec.options), shape(spec), latent(spec)
    shared = DecoderOptions(rms_norm_eps=options.rms_norm_eps, rope_scaling=options.rope_scaling)
    config = decoder_config(spec, shared) | {
        "q_lora_rank": attention.query_latent,
        "kv_lora_rank": attention.latent,
        "qk_nope_head_dim": attention.nope,
        "qk_rope_head_dim": attention.rope,
        "head_dim": attention.rope,
        "v_head_dim": attention.value,
        "attention_bias": False,
        "n_routed_experts": made.count,
        "n_shared_experts": options.n_shared_experts,
        "num_experts_per_tok": made.chosen,
        "moe_intermediate_size": made.hidden,
        "first_k_dense_replace": options.first_k_dense_replace,
        "moe_layer_freq": 1,
        "topk_method": options.topk_method,
        "scoring_func": made.score,
        "norm_topk_prob": made.normalise,
        "routed_scaling_factor": made.scale,
        "n_group": made.groups,
        "topk_group": made.top_groups,
    }
    if options.topk_method != "noaux_tc":
        return {"model_type": "deepseek_v2", **config}
    own = {"rope_interleave": options.rope_interleave, "num_nextn_predict_layers": options.num_nextn_predict_layers}
    return {"model_type": "deepseek_v3", **config, **own}


_PIECES = sparse_pieces({
    "attention.q_a.weight": "self_attn.q_a_proj.weight",
    "attention.q_norm.weight": "self_attn.q_a_layernorm.weight",
    "attention.q_b.weight": "self_attn.q_b_proj.weight",
    "attention.kv_a.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.kv_b.weight": "self_attn.kv_b_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.bias": "mlp.gate.e_score_correction_bias",
    **{f"mlp.experts.{name}": f"mlp.experts.{{}}.{name}_proj.weight" for name in ("gate", "up", "down")},
    **{f"mlp.shared.{name}.weight": f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")},
    "embedding_norm.weight": "enorm.weight",
    "hidden_norm.weight": "hnorm.weight",
    "project.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
})  # fmt: skip


def pieces(parameter: str, shape: tuple[int, ...]) -> list[Piece]:
    """See `HuggingFace.pieces`. In files the layers that predict further tokens follow the blocks."""
    if parameter.startswith("mtp."):
        parameter = parameter.replace("mtp.", "blocks.", 1).replace(".block.", ".", 1)
    return _PIECES(parameter, shape)


HUGGINGFACE = HuggingFace(
    {"deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}, hf_fields, hf_config, shapes,
    pieces, ignored=("*.rotary_emb.inv_freq", "model.layers.{layers}.*"),
)  # fmt: skip


def latent_block(spec: ModelSpec, sparse: bool) -> Block:
    """One layer. `sparse`: with experts."""
    options, attention = Options(**spec.options), latent(spec)
    scale, scaling = (attention.nope + attention.rope) ** -0.5, options.rope_scaling
    if scaling is not None and scaling.rope_type == "yarn" and scaling.mscale_all_dim:
        mscale = yarn_mscale(scaling.factor, scaling.mscale_all_dim)
        scale = scale * mscale * mscale
    mlp = (
        MixtureOfExperts(spec.width, shape(spec))
        if sparse
        else SwiGLU(spec.width, spec.hidden or default_hidden(spec.width))
    )
    made = LatentAttention(spec.width, attention, scale)
    return Block(spec.width, made, mlp, options.rms_norm_eps, spec.dropout)


class FurtherToken(nn.Module):
    """Predicts one more token from the stream of the model, or of the module before, and the embedding of the token before it."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        eps = Options(**spec.options).rms_norm_eps
        self.embedding_norm, self.hidden_norm = RMSNorm(spec.width, eps), RMSNorm(spec.width, eps)
        self.project = nn.Linear(2 * spec.width, spec.width, bias=False)
        self.block = latent_block(spec, sparse=True)
        self.norm = RMSNorm(spec.width, eps)

    def forward(self, x_BTD: Tensor, embedded_BTD: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """x_BTD -> BTD, both normalised. Looks across positions in attention alone."""
        joined = torch.cat((self.embedding_norm(embedded_BTD), self.hidden_norm(x_BTD)), -1)
        out: Tensor = self.norm(self.block(self.project(joined), cos, sin, mask))
        return out


class DeepSeek(SparseDecoder):
    """With multi-token prediction: in training the loss has the gradients of further tokens' losses, and the value without them."""

    after_blocks = ("norm", "head", "mtp")

    def __init__(self, spec: ModelSpec, vocab_size: int) -> None:
        options = Options(**spec.options)
        blocks = [latent_block(spec, sparse=i >= options.first_k_dense_replace) for i in range(spec.layers)]
        rotary = latent(spec).rope
        super().__init__(
            spec, vocab_size, blocks, eps=options.rms_norm_eps, rotary=rotary, scaling=options.rope_scaling
        )
        # Not an nn.ModuleList: its elements would count as blocks. Named by their numbers in files.
        further = range(spec.layers, spec.layers + options.num_nextn_predict_layers)
        self.mtp = nn.ModuleDict({str(i): FurtherToken(spec) for i in further})
        self.mtp_weight = options.mtp_weight
        queries = "q" if options.q_lora_rank is None else "q_b"
        self.attention_rules = {
            "*.attention": "gather",
            f"*.attention.{queries}": "column",
            "*.attention.kv_b": "column",
            "*.attention.out": "row",
        }

    @property
    def shares_embedding(self) -> bool:
        """See Decoder."""
        return self.spec.tie_embeddings or len(self.mtp) > 0

    def outputs(
        self, x_BTD: Tensor, tokens_BT: Tensor, documents_BT: Tensor | None, targets_BT: Tensor | None
    ) -> Tensor:
        """See Decoder."""
        out = super().outputs(x_BTD, tokens_BT, documents_BT, targets_BT)
        if targets_BT is None or not self.training or not self.mtp:
            return out
        further = self.further_loss(x_BTD, tokens_BT, documents_BT, targets_BT)
        return out + (further - further.detach())

    def further_loss(self, x_BTD: Tensor, tokens_BT: Tensor, documents_BT: Tensor | None, targets_BT: Tensor) -> Tensor:
        """The weighted cross entropy of the tokens after the next one, summed over those in the same sequence and document.

        Nothing is cut off at the end of a sequence: tensor parallel ranks share its positions. What stands there is masked.
        """
        cos, sin, masks = self.positions(tokens_BT, documents_BT)
        run_BT = None if documents_BT is None else packed_positions(documents_BT)[1]
        losses = []
        for ahead, module in enumerate(self.mtp.values(), 1):
            goals_BT = _earlier(targets_BT, ahead, MASKED)
            if run_BT is not None:
                goals_BT = goals_BT.masked_fill(_earlier(run_BT, ahead, -1) != run_BT, MASKED)
            embedded_BTD = self.embedding(_earlier(tokens_BT, ahead, 0)).float()
            x_BTD = module(x_BTD, embedded_BTD, cos, sin, masks[None])
            losses.append(self.head(x_BTD, goals_BT))
        return torch.stack(losses).mean() * self.mtp_weight

    def flops_per_token(self, context: int) -> float:
        """See SparseDecoder: the head is computed for each further token, too."""
        return super().flops_per_token(context) + len(self.mtp) * flops_of(self.head.weight)


def _earlier(x_BT: Tensor, by: int, fill: int) -> Tensor:
    """At each position the value that stands `by` positions later; `fill` at the end."""
    return F.pad(x_BT[:, by:], (0, min(by, x_BT.shape[1])), value=fill)


def build(spec: ModelSpec, vocab_size: int) -> DeepSeek:
    """See the contract in __init__.py."""
    return built(lambda: DeepSeek(spec, vocab_size))


build.takes_meta = True  # type: ignore[attr-defined]  # Decoder.init_module creates the weights
