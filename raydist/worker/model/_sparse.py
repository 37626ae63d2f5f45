"""What decoders with experts share: first weights, rules of tensor parallel layers, and FLOPs.

Runs in: each train worker, and in exports of weights. May not import ray.

Experts stay whole under tensor parallel: each rank routes the tokens that it has between split layers (_moe.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from torch import nn

from raydist.spec.decoder import Dense
from raydist.spec.experts import Experts as Shape
from raydist.worker.metrics.flops import flops_of
from raydist.worker.model._decoder import Decoder, built, dense_blocks
from raydist.worker.model._layers import Block, SwiGLU
from raydist.worker.model._moe import Experts, MixtureOfExperts, layers_of

if TYPE_CHECKING:
    from raydist.spec import ModelSpec


class SparseDecoder(Decoder):
    """A decoder in which the feed-forward layer of some blocks has experts."""

    residual = (*Decoder.residual, ".mlp.shared.down")
    attention_rules: Mapping[str, str] = {
        "*.attention": "gather",
        "*.attention.[qkv]": "column",
        "*.attention.out": "row",
    }
    """The tensor rules of an attention layer."""

    @property
    def tensor_rules(self) -> Mapping[str, str]:  # type: ignore[override]
        """Those of a dense decoder, without the feed-forward layers that have experts."""
        rules = {"embedding": "vocabulary", "head": "vocabulary", **self.attention_rules}
        for name, module in self.named_modules():
            if isinstance(module, Block) and isinstance(module.mlp, SwiGLU):
                rules |= {f"{name}.mlp": "gather", f"{name}.mlp.gate": "column", f"{name}.mlp.up": "column"}
                rules[f"{name}.mlp.down"] = "row"
        return rules

    def init_module(self, name: str, module: nn.Module) -> None:
        """See Decoder: each matrix of each expert as that of a linear layer."""
        super().init_module(name, module)
        if isinstance(module, Experts):
            for key, p in module.named_parameters(recurse=False):
                std = p.shape[-1] ** -0.5
                nn.init.normal_(p, std=std / math.sqrt(2 * self.spec.layers) if key == "down" else std)

    def flops_per_token(self, context: int) -> float:
        """See Decoder: of the experts those that a token takes."""
        unused = 0.0
        for _, layer in layers_of(self):
            held = sum(flops_of(p) for p in layer.experts.parameters())
            unused += held * (1 - layer.shape.chosen / layer.shape.count)
        return super().flops_per_token(context) - unused


def sparse_decoder(
    spec: ModelSpec, vocab_size: int, dense: Dense, experts: Shape, layers: Collection[int]
) -> SparseDecoder:
    """For `build`: a decoder of dense blocks, of which those with these numbers have experts."""

    def make() -> SparseDecoder:
        blocks = dense_blocks(spec, dense)
        for i in layers:
            blocks[i].mlp = MixtureOfExperts(spec.width, experts)
        return SparseDecoder(spec, vocab_size, blocks, eps=dense.eps, rotary=dense.head, scaling=dense.scaling)

    return built(make)
