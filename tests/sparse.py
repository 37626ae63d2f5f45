"""A small decoder with experts, for tests of what does not depend on a family: one dense block, then blocks with experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field
from torch import nn

from raydist.spec.decoder import check_ranks
from raydist.spec.experts import Experts
from raydist.spec.parts import Part
from raydist.worker.model import _moe
from raydist.worker.model._decoder import Decoder, built, dense_block

if TYPE_CHECKING:
    from raydist.spec import ModelSpec

EPS = 1e-5
check_tensor = check_ranks


class Options(Part):
    """What the tests vary."""

    experts: int = Field(8, description="Of a layer.")
    balance: float = Field(0.0, description="Factor of the balance loss.")
    bias_rate: float = Field(0.0, description="Of the router's bias.")
    skew: float = Field(0.0, description="First bias of the first two experts: others get few rows, or none.")


def experts(spec: ModelSpec) -> int:
    """Experts of a layer."""
    return Options(**spec.options).experts


def shape(spec: ModelSpec) -> Experts:
    """Of a layer with experts."""
    options = Options(**spec.options)
    return Experts(
        options.experts, 2, 12, score="sigmoid", scale=1.5, shared=16, bias=True, bias_rate=options.bias_rate,
        balance=options.balance,
    )  # fmt: skip


class Sparse(Decoder):
    """Its first block is dense."""

    @property
    def tensor_rules(self) -> dict[str, str]:  # type: ignore[override]
        """Experts are whole on each tensor parallel rank, and take its tokens."""
        rules = {name: kind for name, kind in Decoder.tensor_rules.items() if ".mlp" not in name}
        dense = {name: kind for name, kind in Decoder.tensor_rules.items() if ".mlp" in name}
        return rules | {name.replace("*", "0"): kind for name, kind in dense.items()}

    def init_module(self, name: str, module: nn.Module) -> None:
        """Draws weights that are large enough for routes to differ."""
        super().init_module(name, module)
        if isinstance(module, _moe.Experts):
            for p in module.parameters(recurse=False):
                nn.init.normal_(p, std=p.shape[-1] ** -0.5)
        if isinstance(module, _moe.Router):
            module.bias[:2] += Options(**self.spec.options).skew


def build(spec: ModelSpec, vocab_size: int) -> Sparse:
    """See raydist/worker/model."""

    def make() -> Sparse:
        blocks = [dense_block(spec, EPS) for _ in range(spec.layers)]
        for block in blocks[1:]:
            block.mlp = _moe.MixtureOfExperts(spec.width, shape(spec))
        return Sparse(spec, vocab_size, blocks, eps=EPS, rotary=spec.width // spec.heads)

    return built(make)


build.takes_meta = True  # type: ignore[attr-defined]
