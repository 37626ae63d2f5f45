"""A small decoder with experts, for tests of what does not depend on a family: one dense block, then blocks with experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field
from torch import nn

from raydist.spec.decoder import Dense, check_ranks
from raydist.spec.experts import Experts
from raydist.spec.parts import Part
from raydist.worker.model._decoder import built, dense_blocks
from raydist.worker.model._moe import MixtureOfExperts, Router
from raydist.worker.model._sparse import SparseDecoder

if TYPE_CHECKING:
    from raydist.spec import ModelSpec

check_tensor = check_ranks


class Options(Part):
    """What the tests vary."""

    experts: int = Field(8, description="Of a layer.")
    balance: float = Field(0.0, description="Factor of the balance loss.")
    bias_rate: float = Field(0.0, description="Of the router's bias.")
    frozen: bool = Field(False, description="Every second parameter is not trained.")
    skew: float = Field(0.0, description="First bias of the first two experts: others get few rows, or none.")


def experts(spec: ModelSpec) -> int:
    """Experts of a layer."""
    return Options(**spec.options).experts


class Sparse(SparseDecoder):
    """Its first block is dense."""

    def init_module(self, name: str, module: nn.Module) -> None:
        """See Decoder; and the skew."""
        super().init_module(name, module)
        if isinstance(module, Router):
            module.bias[:2] += Options(**self.spec.options).skew


def build(spec: ModelSpec, vocab_size: int) -> Sparse:
    """See raydist/worker/model."""
    options = Options(**spec.options)
    shape = Experts(
        options.experts, 2, 12, score="sigmoid", scale=1.5, shared=16, bias=True, bias_rate=options.bias_rate,
        balance=options.balance,
    )  # fmt: skip

    def make() -> Sparse:
        dense = Dense(1e-5, spec.width // spec.heads, (None,) * spec.layers)
        blocks = dense_blocks(spec, dense)
        for block in blocks[1:]:
            block.mlp = MixtureOfExperts(spec.width, shape)
        return Sparse(spec, vocab_size, blocks, eps=dense.eps, rotary=dense.head)

    model = built(make)
    for p in [*model.parameters()][::2] if options.frozen else ():
        p.requires_grad_(False)
    return model


build.takes_meta = True  # type: ignore[attr-defined]
