"""Parameters of which each rank of a group has a part along one dimension: the cut itself, and the places of the parts.

Runs in: each train worker. Torch, never ray. Sends nothing. Tensor parallel layers and experts are cut like that; the strategy
then splits a rank's part along the data axis, independently of this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TensorShard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from raydist.errors import UserError
from raydist.worker.mesh import Mesh
from raydist.worker.parallel import ParamShard
from raydist.worker.parallel._model_graph import plain_name


@dataclass(frozen=True, slots=True)
class Cut:
    """How a parameter is split: along dimension `dim` of its whole `shape`, in parts as those of torch.chunk."""

    dim: int
    shape: torch.Size

    def sizes(self, ranks: int) -> list[int]:
        """How much of the dimension each rank has."""
        each = -(-self.shape[self.dim] // ranks)
        return [max(min(each, self.shape[self.dim] - rank * each), 0) for rank in range(ranks)]


class Cuts:
    """The cut parameters of a model, by name. The ranks that share them are those along the axis `tensor` of `mesh`; `field` of
    `parallel` says how many."""

    def __init__(self, mesh: Mesh, field: str) -> None:
        self._mesh, self._field = mesh, field
        self.rank, self.size = mesh.tensor_rank, mesh.tensor
        self._cuts: dict[str, Cut] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._cuts

    def __getitem__(self, name: str) -> Cut:
        return self._cuts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._cuts)

    def add(self, name: str, cut: Cut) -> None:
        """One more parameter. Raises UserError if it cannot be cut like that."""
        if self._cuts.setdefault(name, cut) != cut:
            raise UserError(
                f"{name}: tensor_rules split it in two ways: it is one parameter of several layers",
                "give layers with tied weights the same rule",
            )
        if 0 in cut.sizes(self.size):
            raise UserError(
                f"{name}: parallel.{self._field}: {self.size} leaves a rank none of its {cut.shape[cut.dim]} parts",
                f"set parallel.{self._field} lower",
            )

    def apply(self, model: nn.Module) -> None:
        """Leaves this rank its part of each. A model on the meta device is cut while it is initialised: each weight is drawn whole
        and then cut, so that the first values are those of one process."""
        if any(p.is_meta for p in model.parameters()):
            own = model.init_module

            def init_module(name: str, module: nn.Module) -> None:
                own(name, module)  # type: ignore[operator]
                self._cut_own(name, module)

            model.init_module = init_module  # type: ignore[assignment]
        else:
            for name, module in model.named_modules():
                self._cut_own(name, module)

    def _cut_own(self, name: str, module: nn.Module) -> None:
        for key, p in module.named_parameters(name, recurse=False):
            cut = self._cuts.get(plain_name(key))  # a tied weight has its rule under its first name
            if cut is not None:
                p.data = torch.split(p.data, cut.sizes(self.size)[0], cut.dim)[self.rank].clone()

    def place(self, shards: dict[str, ParamShard]) -> None:
        """Gives those of a strategy's shards that are cut their places in the whole model. Their `local` are the same objects."""
        peers = [self._mesh.rank.rank - self.rank + r for r in range(self.size)]
        meshes: dict[int, DeviceMesh] = {}
        for name in self._cuts.keys() & shards.keys():
            shard, cut = shards[name], self._cuts[name]
            of_data = shard.like.device_mesh if shard.like is not None else None
            if id(of_data) not in meshes:
                meshes[id(of_data)] = _with_peers(self._mesh.rank.device.type, of_data, self.rank, peers)
            placements = (TensorShard(cut.dim), *(shard.like.placements if shard.like is not None else ()))
            meta = TensorMeta(cut.shape, torch.empty(cut.shape, device="meta").stride(), shard.local.dtype)
            spec = DTensorSpec(meshes[id(of_data)], placements, tensor_meta=meta)
            like = DTensor(shard.local.detach(), spec, requires_grad=False)  # type: ignore[no-untyped-call]
            shards[name] = ParamShard(shard.local, like)

    def same(self, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """These ranks in groups that have the same part of a cut parameter."""
        by_part = [tuple(r for r in ranks if self._mesh.coordinate(r)[3] == part) for part in range(self.size)]
        return tuple(group for group in by_part if group)


def _with_peers(device: str, of_data: DeviceMesh | None, rank: int, peers: list[int]) -> DeviceMesh:
    """The mesh of a strategy, and in front of it the ranks that share a parameter; without groups: nothing is sent along it."""
    if of_data is None:
        return DeviceMesh(device, peers, mesh_dim_names=("tensor",), _init_backend=False)
    ranks = torch.stack([of_data.mesh - peers[rank] + peer for peer in peers])
    names = ("tensor", *(of_data.mesh_dim_names or ()))
    return DeviceMesh(device, ranks, mesh_dim_names=names, _init_backend=False)
