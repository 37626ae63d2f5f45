"""What the built-in decoders check and take as options. The models themselves are in raydist/worker/model.

Runs anywhere. Imports no torch: a model's file takes its `Options`, `check_spec` and `check_tensor` from here, and these are read
without importing that file (raydist/registry.py, `described`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from raydist.spec.parts import Part, near_divisors, problem

if TYPE_CHECKING:
    from raydist.spec.training import ModelSpec

_NEEDS = {"linear": (), "dynamic": ("original_max_position_embeddings",), "yarn": ("original_max_position_embeddings",),
          "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}  # fmt: skip
_TAKES = {
    **_NEEDS,
    "yarn": ("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
             "truncate"),
}  # fmt: skip


class RopeScaling(Part):
    """How rotary frequencies are changed for contexts longer than the first one: `rope_scaling` of a Hugging Face config.json."""

    rope_type: Literal["linear", "dynamic", "llama3", "yarn"] = Field(
        description="Which formula; each takes fields of its own."
    )
    factor: float = Field(ge=1, description="How many times longer the context becomes.")
    original_max_position_embeddings: int | None = Field(
        None, ge=1, description="dynamic, llama3, yarn: the context before scaling."
    )
    low_freq_factor: float | None = Field(
        None, gt=0, description="llama3: wavelengths over original / this are scaled by the whole factor."
    )
    high_freq_factor: float | None = Field(
        None, gt=0, description="llama3: wavelengths under original / this are not scaled."
    )
    attention_factor: float | None = Field(
        None, gt=0, description="yarn: factor of cos and sin; default: from factor, or mscale and mscale_all_dim."
    )
    beta_fast: float = Field(32.0, gt=0, description="yarn: dimensions that turn more often than this are not scaled.")
    beta_slow: float = Field(
        1.0, gt=0, description="yarn: dimensions that turn less often are scaled by the whole factor."
    )
    mscale: float | None = Field(None, ge=0, description="yarn: numerator of attention_factor (DeepSeek).")
    mscale_all_dim: float | None = Field(None, ge=0, description="yarn: denominator of attention_factor (DeepSeek).")
    truncate: bool = Field(True, description="yarn: round the bounds between scaled and other dimensions outwards.")

    @model_validator(mode="after")
    def _fits(self) -> RopeScaling:
        for field in _NEEDS[self.rope_type]:
            if getattr(self, field) is None:
                raise problem(
                    field, None, f"is missing: rope_type {self.rope_type} needs it", "copy it from config.json"
                )
        for field in sorted(self.model_fields_set - {"rope_type", "factor", *_TAKES[self.rope_type]}):
            raise problem(field, getattr(self, field), f"has no effect with rope_type {self.rope_type}", "remove it")
        if self.rope_type == "llama3" and self.low_freq_factor == self.high_freq_factor:
            raise problem("low_freq_factor", self.low_freq_factor, "is high_freq_factor, too", "set it lower")
        return self


class DecoderOptions(Part):
    """The options that the decoders share, with the names of config.json."""

    head_dim: int | None = Field(None, ge=2, description="Size of a head; default: width / heads.")
    rms_norm_eps: float = Field(1e-5, gt=0, description="Added to the mean square in each RMSNorm.")
    rope_scaling: RopeScaling | None = Field(None, description="Rotary frequencies for a longer context.")
    sliding_window: int | None = Field(
        None, ge=1, description="Tokens that a token attends to, itself included; default: all before it."
    )


def default_hidden(width: int) -> int:
    """Width of the feed-forward layer: 8/3 of the width (as many weights as 4x without a gate), in whole 32s."""
    return 32 * math.ceil(width * 8 / 3 / 32)


def check_scaling(scaling: RopeScaling | None, head: int) -> None:
    """Raises SpecValueError if heads of which `head` numbers are rotated have no such frequencies."""
    if scaling is not None and scaling.rope_type == "dynamic" and head == 2:
        raise problem("options.rope_scaling.rope_type", "dynamic",
                      "divides by the rotated size of a head less 2, which is 0 here", "take linear, or larger heads")  # fmt: skip


def check_heads(spec: ModelSpec, options: DecoderOptions | None = None) -> None:
    """Raises SpecValueError if the heads cannot be made. `options`: of a decoder that has them."""
    head_dim = options.head_dim if options else None
    if head_dim is None and spec.width % spec.heads:
        raise problem("heads", spec.heads, f"does not divide width {spec.width}", near_divisors(spec.width, spec.heads))
    if head_dim is not None and head_dim % 2:
        raise problem("options.head_dim", head_dim, "is odd", "rotary positions need an even size")
    if head_dim is None and (spec.width // spec.heads) % 2:
        raise problem("heads", spec.heads, f"makes heads of odd size {spec.width // spec.heads}",
                      "rotary positions need an even width / heads")  # fmt: skip
    if spec.kv_heads and spec.heads % spec.kv_heads:
        raise problem("kv_heads", spec.kv_heads, f"does not divide heads {spec.heads}",
                      near_divisors(spec.heads, spec.kv_heads))  # fmt: skip
    check_scaling(options.rope_scaling if options else None, head_dim or spec.width // spec.heads)


def check_ranks(spec: ModelSpec, ranks: int) -> None:
    """Raises SpecValueError if `ranks` tensor parallel ranks cannot share heads and feed-forward of a dense block."""
    kv_heads = spec.kv_heads or spec.heads
    if kv_heads % ranks:
        field = "kv_heads" if spec.kv_heads else "heads"
        raise problem(field, kv_heads, f"cannot be shared by parallel.tensor: {ranks} ranks",
                      near_divisors(kv_heads, ranks, "parallel.tensor:"))  # fmt: skip
    hidden = spec.hidden or default_hidden(spec.width)
    if hidden < ranks:
        raise problem("hidden", hidden, f"is less than parallel.tensor: {ranks}", "set parallel.tensor lower")


def check_sequence_ranks(spec: ModelSpec, tensor: int, context: int) -> None:
    """For `check_context`. Raises SpecValueError if `context` ranks cannot exchange the heads that a tensor parallel rank has.

    Key and value heads that they do not divide are sent to several ranks, so these need not be divided.
    """
    if (spec.heads // tensor) % context:
        of = f"parallel.context: {context} ranks" + (f" x parallel.tensor: {tensor}" if tensor > 1 else "")
        raise problem("heads", spec.heads, f"cannot be shared by {of}",
                      near_divisors(spec.heads // tensor, context, "parallel.context:"))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dense:
    """What a decoder of dense blocks has besides the fields of `ModelSpec`.

    `eps` of each RMSNorm; `head`: the size of a head; `windows`: of each layer the tokens that one attends to; None: all before it.
    """

    eps: float
    head: int
    windows: tuple[int | None, ...]
    scaling: RopeScaling | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False

    def shapes(self, spec: ModelSpec, vocab_size: int) -> dict[str, tuple[int, ...]]:
        """The parameters of that decoder, by name."""
        kv_heads, hidden = spec.kv_heads or spec.heads, spec.hidden or default_hidden(spec.width)
        linear = {
            "attention.q": (spec.heads * self.head, spec.width, self.qkv_bias),
            "attention.k": (kv_heads * self.head, spec.width, self.qkv_bias),
            "attention.v": (kv_heads * self.head, spec.width, self.qkv_bias),
            "attention.out": (spec.width, spec.heads * self.head, self.out_bias),
            "mlp.gate": (hidden, spec.width, self.mlp_bias),
            "mlp.up": (hidden, spec.width, self.mlp_bias),
            "mlp.down": (spec.width, hidden, self.mlp_bias),
        }
        block: dict[str, tuple[int, ...]] = {
            f"{name}.weight": (rows, columns) for name, (rows, columns, _) in linear.items()
        }
        block |= {f"{name}.bias": (rows,) for name, (rows, _, bias) in linear.items() if bias}
        block |= {f"{name}.weight": (spec.width,) for name in ("attention_norm", "mlp_norm")}
        if self.qk_norm:
            block |= {f"attention.{name}.weight": (self.head,) for name in ("q_norm", "k_norm")}
        made: dict[str, tuple[int, ...]] = {"embedding.weight": (vocab_size, spec.width), "norm.weight": (spec.width,)}
        if not spec.tie_embeddings:
            made["head.weight"] = (vocab_size, spec.width)
        return made | {f"blocks.{i}.{name}": shape for i in range(spec.layers) for name, shape in block.items()}
