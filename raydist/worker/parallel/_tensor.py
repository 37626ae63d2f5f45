"""Tensor parallel: the ranks of a group hold parts of a layer's weights and compute parts of its output, for the same samples.

Runs in: each train worker. Torch, never ray.

    tokens of this rank --gather--> all tokens, own columns --own rows--> partial sums --sum--> tokens of this rank
                        attention, mlp (column)                 (row)

Between these layers each rank has its part of the tokens (sequence parallel), so norms, dropout and the residual stream are split,
too. A vocabulary is split over embedding, head and loss: no rank has all logits.

What is split, and where, is written in the model: `tensor_rules`, the name of a module (with `*`) -> one of

    gather       its first argument is gathered: the whole sequence enters
    column       a Linear with its own rows of the weight, so its own columns of the output; biases too
    row          a Linear with its own columns of the weight, for the output of a column layer; the outputs are summed
    vocabulary   an Embedding or a Linear with its own part of the vocabulary: the first and the last layer

All other parameters are whole on every rank, and each rank's gradient of them is a part of the sum: of its tokens, or its heads.
`sum_gradients` adds these up, in one all-reduce. The strategy splits what a rank has along `data`, independently of
this file.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from raydist.errors import UserError
from raydist.worker import lora
from raydist.worker.comm.tree import sum_flat
from raydist.worker.mesh import Mesh
from raydist.worker.model._chunked_cross_entropy import head_loss
from raydist.worker.parallel import ParamShard
from raydist.worker.parallel._cut import Cut, Cuts
from raydist.worker.parallel._model_graph import plain_name
from raydist.worker.parallel._tensor_ops import (
    VocabularyShard,
    gather_sequence,
    gather_vocabulary,
    sum_sequence,
    vocabulary_loss,
)

KINDS = ("gather", "column", "row", "vocabulary")
WHOLE = {"column": (lora.A,), "row": ("bias", lora.B), "vocabulary": ()}
"""The parameters of a split layer that every rank has whole."""


class TensorParallel:
    """The layers of one model, split over the tensor group of `mesh`. Every rank has one.

    `partial`: names of the parameters that are whole on every rank, once `place` was called. A rank's gradient of these is a part
    of the sum, until `sum_gradients`.
    """

    def __init__(self, mesh: Mesh) -> None:
        group = mesh.group("tensor")
        assert group is not None, "a group of several ranks"
        self.group, self._mesh = group, mesh
        self.cuts = Cuts(mesh, "tensor")
        self._shards: Mapping[str, ParamShard] = {}
        self.partial: frozenset[str] = frozenset()

    def split(self, model: nn.Module) -> None:
        """Splits the weights, and lets the layers send. Before `strategy.wrap`. Sends nothing.

        Raises UserError if the model has no rules, or rules that do not fit it.
        """
        kinds = _kinds(model)
        names = {id(p): plain_name(n) for n, p in model.named_parameters()}
        for module, kind in kinds.items():
            for key, p in module.named_parameters(recurse=False) if kind != "gather" else ():
                if key in WHOLE[kind]:
                    continue
                self.cuts.add(names[id(p)], Cut(1 if kind == "row" else 0, p.shape))
        for module, kind in kinds.items():
            if kind == "vocabulary":
                self._let_send(module, kind, self.cuts[names[id(module.weight)]])
            else:
                self._let_send(module, kind)
        inside = {inner for module, kind in kinds.items() if kind == "gather" for inner in module.modules()}
        for name, module in model.named_modules():
            if not isinstance(module, nn.Dropout) or not module.p:
                continue
            if module in inside:
                raise UserError(
                    f"parallel.tensor: {self.cuts.size}: {name} would draw other numbers than one process: it is inside a layer "
                    "whose output is split",
                    "set its probability to 0, or move it behind the layer",
                )
        self.cuts.apply(model)

    def _let_send(self, module: nn.Module, kind: str, cut: Cut | None = None) -> None:
        group = self.group
        if kind == "gather":
            module.register_forward_pre_hook(lambda _, args: (gather_sequence(args[0], group), *args[1:]))
        elif kind == "row":
            assert isinstance(module, nn.Linear)
            module.forward = partial(_row, module, group)  # type: ignore[method-assign]
        elif cut is not None:
            sizes = cut.sizes(self.cuts.size)
            shard = VocabularyShard(group, sum(sizes[: self.cuts.rank]), max(sizes))
            forward = _embedding if isinstance(module, nn.Embedding) else partial(_head, sizes)
            module.forward = partial(forward, module, shard)  # type: ignore[arg-type]

    def place(self, shards: dict[str, ParamShard], complete: Container[str] = ()) -> None:
        """See `Cuts.place`. `complete`: names of parameters whose gradients need no sum over the tensor group."""
        self.cuts.place(shards)
        self._shards = shards
        self.partial = frozenset(name for name in shards if name not in self.cuts and name not in complete)

    def final(self, callback: Callable[[Sequence[Tensor]], None]) -> Callable[[Sequence[Tensor]], None]:
        """For `strategy.on_final`: `callback` without the parameters whose gradients are not summed over the tensor group yet."""
        own = {id(self._shards[name].local) for name in self.partial}
        return lambda parameters: callback([p for p in parameters if id(p) not in own])

    def sum_gradients(self) -> None:
        """Adds up the ranks' parts of the gradients of `partial`. Once a step, when the strategy has summed them over `data`."""
        grads = [shard.local.grad for name, shard in self._shards.items() if name in self.partial]
        sum_flat(grads, self.group, self._mesh.rank.device)


def _kinds(model: nn.Module) -> dict[nn.Module, str]:
    """The modules that `tensor_rules` names, each with its kind. Raises UserError for rules that do not fit the model."""
    rules: Mapping[str, str] | None = getattr(model, "tensor_rules", None)
    if not rules:
        raise UserError(
            f"parallel.tensor: {type(model).__name__} has no tensor_rules, which say how its layers are split",
            "add them (docs/reference/models.md), or set parallel.tensor: 1",
        )
    found: dict[nn.Module, str] = {}
    for pattern, kind in rules.items():
        modules = [(name, module) for name, module in model.named_modules() if fnmatchcase(name, pattern)]
        if not modules:
            raise UserError(
                f"tensor_rules: {pattern}: the model has no such module", "name a module, with * for any text"
            )
        for name, module in modules:
            types = {"gather": nn.Module, "vocabulary": (nn.Embedding, nn.Linear)}.get(kind, nn.Linear)
            if kind not in KINDS or not isinstance(module, types):  # type: ignore[arg-type]
                raise UserError(
                    f"tensor_rules: {pattern}: {kind} does not fit {name}, a {type(module).__name__}",
                    f"the rules are {', '.join(KINDS)}; see raydist/worker/parallel/_tensor.py",
                )
            if isinstance(module, nn.Embedding) and (module.max_norm or module.scale_grad_by_freq or module.sparse):
                raise UserError(
                    f"{name}: max_norm, scale_grad_by_freq and sparse need the whole embedding on one rank",
                    "leave them out, or set parallel.tensor: 1",
                )
            found[module] = kind
    return found


def _row(module: nn.Linear, group: dist.ProcessGroup, x_BTF: Tensor) -> Tensor:
    bias: Tensor | None = module.bias
    summed_BSD = sum_sequence(lora.product(module, x_BTF), group)
    return summed_BSD if bias is None else summed_BSD + bias


def _embedding(module: nn.Embedding, shard: VocabularyShard, tokens_BT: Tensor) -> Tensor:
    local_BT = tokens_BT - shard.first
    rows = module.weight.shape[0]
    here_BT = (local_BT >= 0) & (local_BT < rows)
    padding = None if module.padding_idx is None else module.padding_idx - shard.first
    own_BTD = F.embedding(
        torch.where(here_BT, local_BT, 0),
        module.weight,
        padding_idx=padding if padding is not None and 0 <= padding < rows else None,
    )
    return sum_sequence(own_BTD * here_BT[..., None], shard.group)


def _head(
    sizes: list[int], module: nn.Linear, shard: VocabularyShard, x_BSD: Tensor, targets_BT: Tensor | None = None
) -> Tensor:
    """All logits on every rank; with targets only their loss."""
    x_BTD = gather_sequence(x_BSD, shard.group)
    bias: Tensor | None = module.bias
    if targets_BT is not None and bias is None:
        return head_loss(x_BTD.flatten(0, 1), module.weight, targets_BT.flatten(), shard)
    logits_BTV = F.linear(x_BTD, module.weight, bias)
    if targets_BT is not None:
        return vocabulary_loss(logits_BTV.flatten(0, 1), targets_BT.flatten(), shard)
    return gather_vocabulary(logits_BTV, sizes, shard.group)
