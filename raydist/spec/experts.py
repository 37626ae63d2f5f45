"""What a mixture-of-experts layer has besides the fields of a dense one. The layer itself is raydist/worker/model/_moe.py.

Runs anywhere. Imports no torch, see raydist/spec/decoder.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from raydist.spec.parts import Part, near_divisors, problem


class SparseOptions(Part):
    """The options that decoders with experts share, with the names of config.json where it has them."""

    num_experts_per_tok: int = Field(2, ge=1, description="Experts that a token takes.")
    balance_loss: float = Field(
        0.0,
        ge=0,
        description="Factor of the sequence-wise balance loss, which is added to the loss of a token; 0: none.",
    )


@dataclass(frozen=True, slots=True)
class Experts:
    """The feed-forward layer of a block, made of `count` experts of which a token takes `chosen`.

    `hidden`: the width of an expert; `shared`: of the expert that all tokens take, 0 for none; `shared_gate`: whether a sigmoid of
    the token scales that one. `score`: what makes scores of the router's logits. `groups`: the experts are in so many groups, of
    which a token may take from `top_groups`; the score of a group is that of its best expert, or the sum of its two best.
    `normalise`: the weights of the chosen sum to 1; then they are multiplied by `scale`. `bias`: the choice is by score plus a
    bias, which is moved by `bias_rate` each step towards equal loads (arXiv 2408.15664). `balance`: the factor of the sequence-wise
    balance loss (arXiv 2412.19437, equations 17 to 20).
    """

    count: int
    chosen: int
    hidden: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "two best"] = "best"
    shared: int = 0
    shared_gate: bool = False
    bias: bool = False
    bias_rate: float = 0.0
    balance: float = 0.0

    def shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        """The parameters and persistent buffers of the layer, by name, for tokens of this width."""
        made: dict[str, tuple[int, ...]] = {"router.weight": (self.count, width)}
        if self.bias:
            made["router.bias"] = (self.count,)
        made |= {f"experts.{name}": (self.count, self.hidden, width) for name in ("gate", "up")}
        made["experts.down"] = (self.count, width, self.hidden)
        if self.shared:
            made |= {f"shared.{name}.weight": (self.shared, width) for name in ("gate", "up")}
            made["shared.down.weight"] = (width, self.shared)
        if self.shared_gate:
            made["shared_gate.weight"] = (1, width)
        return made


def with_experts(
    shapes: Mapping[str, tuple[int, ...]], width: int, experts: Experts, layers: Collection[int]
) -> dict[str, tuple[int, ...]]:
    """The shapes of a decoder's parameters, with experts in place of the feed-forward layer of these blocks."""
    places = tuple(f"blocks.{i}.mlp." for i in layers)
    made = {name: shape for name, shape in shapes.items() if not name.startswith(places)}
    return made | {place + name: shape for place in places for name, shape in experts.shapes(width).items()}


def check_experts(experts: Experts, *, count: str, chosen: str, groups: str = "", top_groups: str = "") -> None:
    """Raises SpecValueError if tokens cannot be routed like that. The texts: the names of the options that say these numbers."""
    if experts.chosen > experts.count:
        raise problem(f"options.{chosen}", experts.chosen, f"is more than the {experts.count} experts of {count}",
                      "take fewer")  # fmt: skip
    if experts.count % experts.groups:
        raise problem(f"options.{groups}", experts.groups, f"does not divide {count}: {experts.count}",
                      near_divisors(experts.count, experts.groups))  # fmt: skip
    each = experts.count // experts.groups
    if experts.group_score == "two best" and experts.groups > 1 and each < 2:
        raise problem(f"options.{groups}", experts.groups, "leaves one expert in a group, whose score is that of two",
                      "take fewer groups")  # fmt: skip
    if experts.top_groups > experts.groups:
        raise problem(f"options.{top_groups}", experts.top_groups, f"is more than the {experts.groups} groups",
                      "take fewer")  # fmt: skip
    if experts.chosen > experts.top_groups * each:
        raise problem(f"options.{chosen}", experts.chosen,
                      f"is more than the {experts.top_groups * each} experts of {experts.top_groups} groups",
                      f"take fewer, or raise {top_groups}")  # fmt: skip
