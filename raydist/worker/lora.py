"""Adapters of low rank on linear layers (LoRA, arXiv 2106.09685): the base is frozen, two small matrices a layer are trained.

Runs in: each train worker, and in exports of weights. Torch, never ray.

    y = W x + b + (alpha / rank) B A dropout(x)        A [rank, in] random, B [out, rank] zero at first

The base keeps the names of its parameters; a layer gets `lora_A` and `lora_B` beside its weight. What is frozen has
`requires_grad` False, so no strategy reduces or updates it, and comes from the folder `model.hf`, so checkpoints leave it out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from raydist.spec.lora import chosen
from raydist.spec.training import LoraSpec
from raydist.worker.parallel import ParamShard
from raydist.worker.parallel._model_graph import plain_name

A, B = "lora_A", "lora_B"
"""The names of an adapter's parameters in its layer."""


class LoraLinear(nn.Linear):
    """A linear layer with an adapter. It has the weight and the bias of `linear`, the same objects."""

    def __init__(self, linear: nn.Linear, spec: LoraSpec) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.scale = linear.in_features, linear.out_features, spec.scale
        self.weight, self.bias = linear.weight, linear.bias
        new = linear.weight.new_empty
        self.lora_A = nn.Parameter(new(spec.rank, linear.in_features))
        self.lora_B = nn.Parameter(new(linear.out_features, spec.rank))
        self.lora_dropout = nn.Dropout(spec.dropout)

    def delta(self, x: Tensor) -> Tensor:
        """What the adapter adds to the output."""
        return self.scale * F.linear(F.linear(self.lora_dropout(x), self.lora_A), self.lora_B)

    def forward(self, x: Tensor) -> Tensor:
        """See the module."""
        return F.linear(x, self.weight, self.bias) + self.delta(x)

    def draw(self) -> None:
        """First values, from torch's default generator, as in peft: the adapter changes nothing until it is trained."""
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B)


def product(linear: nn.Linear, x: Tensor) -> Tensor:
    """The output of a layer without its bias."""
    made = F.linear(x, linear.weight)
    return made + linear.delta(x) if isinstance(linear, LoraLinear) else made


def add(model: nn.Module, spec: LoraSpec) -> None:
    """Freezes a model, and gives the linear layers of its blocks adapters. On the meta device `init_module` then draws them, too.

    Routers, stacked experts and layers that predict further tokens get none. Raises UserError for targets that name no layer.
    """
    linears = {n: m for n, m in model.named_modules() if type(m) is nn.Linear and n.startswith("blocks.")}
    for p in model.parameters():
        p.requires_grad_(False)
    meta = any(p.is_meta for p in model.parameters())
    made = []
    for name in chosen(linears, spec.targets):
        parent, _, key = name.rpartition(".")
        made.append(LoraLinear(linears[name], spec))
        setattr(model.get_submodule(parent), key, made[-1])
    if not meta:
        for layer in made:
            layer.draw()
        return
    own = model.init_module

    def init_module(name: str, module: nn.Module) -> None:
        own(name, module)  # type: ignore[operator]
        if isinstance(module, LoraLinear):
            module.draw()

    model.init_module = init_module  # type: ignore[assignment]


def frozen_shards(model: nn.Module) -> dict[str, ParamShard]:
    """This rank's part of each parameter that is not trained, by the names of the plain model, with its place along `data`."""
    found = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            whole = p.detach()
            local = whole.to_local() if isinstance(whole, DTensor) else whole
            like = whole if isinstance(whole, DTensor) else None
            found[plain_name(name)] = ParamShard(nn.Parameter(local, requires_grad=False), like)
    return found


def merge(name: str, weight: Tensor, adapters: Mapping[str, Tensor], spec: LoraSpec) -> Tensor:
    """A weight of the base with its adapter's product added, if it has an adapter."""
    layer = name.removesuffix(".weight")
    if f"{layer}.{A}" not in adapters or layer == name:
        return weight
    return weight + spec.scale * (adapters[f"{layer}.{B}"] @ adapters[f"{layer}.{A}"])


def layers_of(adapters: Iterable[str]) -> list[str]:
    """The layers that have these adapters' parameters."""
    return [name.removesuffix(f".{A}") for name in adapters if name.endswith(f".{A}")]
