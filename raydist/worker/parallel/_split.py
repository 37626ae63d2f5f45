"""The layers of a model, split over the ranks of a replica: tensor parallel layers and experts, and what both have together; and
the sequences between them.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from raydist.worker.mesh import Mesh
from raydist.worker.parallel import ParamShard
from raydist.worker.parallel._context import share_sequences, whole_masks
from raydist.worker.parallel._cut import Cuts
from raydist.worker.parallel._expert import split_experts
from raydist.worker.parallel._tensor import TensorParallel


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """What of a model is split, one of them or both: the layers over the tensor group, the experts over the expert group."""

    tensor: TensorParallel | None
    experts: Cuts | None

    def shards(self, of_strategy: Mapping[str, ParamShard]) -> dict[str, ParamShard]:
        """The strategy's shards with their places in the whole model. Their `local` are the same objects."""
        made = dict(of_strategy)
        if self.experts is not None:
            self.experts.place(made)
        if self.tensor is not None:
            self.tensor.place(made, complete=frozenset(self.experts or ()))
        return made

    def place(self, shards: dict[str, ParamShard]) -> None:
        """Gives parts of parameters that are not trained their places in the whole model."""
        for cuts in (self.experts, self.tensor.cuts if self.tensor is not None else None):
            if cuts is not None:
                cuts.place(shards)

    def same(self, name: str, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Those `ranks` in groups that have the same part of a parameter, as far as the layers are split."""
        for cuts in (self.experts, self.tensor.cuts if self.tensor is not None else None):
            if cuts is not None and name in cuts:
                return cuts.same(ranks)
        return (ranks,)

    @property
    def partial(self) -> frozenset[str]:
        """Parameters of whose gradients a rank has a part of the sum over `group`, until `sum_gradients`."""
        return self.tensor.partial if self.tensor is not None else frozenset()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The tensor group."""
        return self.tensor.group if self.tensor is not None else None

    def final(self, callback: Callable[[Sequence[Tensor]], None]) -> Callable[[Sequence[Tensor]], None]:
        """See `TensorParallel.final`."""
        return self.tensor.final(callback) if self.tensor is not None else callback

    def sum_gradients(self) -> None:
        """See `TensorParallel.sum_gradients`."""
        if self.tensor is not None:
            self.tensor.sum_gradients()


def split_layers(model: nn.Module, mesh: Mesh, exchange: str = "all_to_all") -> LayerSplit | None:
    """Splits a model over the ranks of the mesh that share layers: see `TensorParallel.split` and `split_experts`.

    `exchange`: how rows get to the experts. None where one rank has whole layers. Sends nothing. Raises UserError.
    """
    tensor = None
    if mesh.tensor > 1:
        tensor = TensorParallel(mesh)
        tensor.split(model)
    if mesh.context > 1:
        share_sequences(model, mesh)
    whole_masks(model, mesh)
    experts = split_experts(model, mesh, exchange)
    return LayerSplit(tensor, experts) if tensor is not None or experts is not None else None
