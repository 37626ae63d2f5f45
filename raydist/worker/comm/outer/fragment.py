"""One fragment of the model: its outer weights and momentum, of which each replica has some rows, and its outer step.

Runs in: each train worker. Torch, never ray.

    plain      each replica's weights x its share of the tokens --reduce-scatter--> mean, by rows
               outer gradient = outer weights - mean; momentum; new outer weights --all-gather--> whole, on every replica
    rounded    (outer weights - own weights) x share --encoded, all-to-all--> outer gradient, by rows; momentum
               change of the outer weights --encoded, all-gather--> subtracted, from the same bytes on every replica

The difference is what may be rounded, so for it each replica keeps the outer weights of all rows. The exchange changes nothing that
a checkpoint saves: `take` does, in the training thread. So a copy of the state may be taken while a sum is on its way, and the sum
can be sent again from `sent`, with the same bits.

Shape suffixes: R replicas, S numbers of a row (padded), B bytes of an encoded row.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from raydist.spec.comm import OuterSpec
from raydist.worker.comm import gloo_p2p
from raydist.worker.comm.compression import piece as pieces
from raydist.worker.comm.compressors import Rows
from raydist.worker.mesh import Mesh
from raydist.worker.parallel import ParamShard

_FP32 = 4


class Fragment:
    """`shards`: its parameters as this rank's optimizer updates them. `group`: the ranks with the same place in their replica, or
    None if there is one replica. `compressor`: None for plain sums."""

    def __init__(
        self,
        shards: Mapping[str, ParamShard],
        spec: OuterSpec,
        mesh: Mesh,
        group: dist.ProcessGroup | None,
        compressor: Rows | None,
    ) -> None:
        self.shards, self._spec, self._group, self._compressor = dict(shards), spec, group, compressor
        device = mesh.rank.device
        self._replicas, self._row = mesh.copies, mesh.copy(mesh.rank.rank)
        self._locals = {name: shard.local.detach() for name, shard in shards.items()}
        shapes = {name: local.shape for name, local in self._locals.items()}
        # Tensor ranks have the same norms, and stages the same tied embedding, beside other parameters: it must be rounded alike.
        apart = mesh.tensor > 1 or mesh.pipeline > 1
        self._piece = pieces.packed(shapes, self._replicas, compressor, apart)
        size = self._piece.size
        self.sent_bytes = self._replicas * (compressor.row_bytes(size) if compressor else size * _FP32)
        """Of `sent`: the rows for all replicas."""
        rows = self._replicas if compressor else 1
        self._whole = torch.zeros(rows, size, device=device)
        self.outer: Tensor = self._whole[self._row if compressor else 0]
        """[S]: this replica's rows of the outer weights."""
        self.momentum = torch.zeros(size, device=device)
        self._momentum_made = torch.zeros_like(self.momentum)
        self._came = torch.empty(0)
        self._result = torch.empty(0)
        self._device, self._mesh = device, mesh

    @property
    def nbytes(self) -> int:
        """Bytes that this rank sends to others in an outer step."""
        return 2 * self.sent_bytes // self._replicas * (self._replicas - 1)

    # --- the state

    def begin(self) -> None:
        """The outer weights are this replica's own weights, which are the same on all."""
        rows_RS = torch.zeros(self._replicas, self._piece.size, device=self._device)
        self._piece.take(rows_RS, self._locals)
        self._whole.copy_(rows_RS if self._compressor else rows_RS[self._row : self._row + 1])

    def spread(self, into_locals: bool) -> None:
        """Gathers the outer weights of all rows; `into_locals`: they become the replica's own. All ranks of the group."""
        rows_RS = torch.empty(self._replicas, self._piece.size, device=self._device)
        self._all_gather(rows_RS, self.outer.clone())
        if self._compressor:
            self._whole.copy_(rows_RS)
        if into_locals:
            self._blend(rows_RS, 0.0)

    def parts(self, row_S: Tensor) -> dict[str, Tensor]:
        """`outer` or `momentum` as DTensors of the whole parameters, in the same memory."""
        found: dict[str, Tensor] = {}
        for name, shape, at, length in self._piece.places():
            shard = self.shards[name]
            width = shape[1:].numel()
            each = length // width if width else 0
            count = max(min(each, shape[0] - self._row * each), 0)
            local = row_S[at : at + count * width].view(count, *shape[1:])
            mesh, placements = _beside(shard, self._mesh)
            whole = shard.shape
            meta = TensorMeta(whole, torch.empty(whole, device="meta").stride(), row_S.dtype)
            spec = DTensorSpec(mesh, placements, tensor_meta=meta)
            found[name] = DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return found

    # --- an outer step

    @torch.no_grad()
    def put(self, sent: Tensor, weight: float) -> None:
        """Writes what this replica contributes into `sent`, uint8. `weight`: its share of the tokens."""
        piece, compressor = self._piece, self._compressor
        if compressor is None:
            values_RS = sent.view(torch.float32).view(self._replicas, piece.size)
        else:
            values_RS = torch.empty(self._replicas, piece.size, device=self._device)
        piece.take(values_RS, self._locals)
        if compressor is not None:
            torch.sub(self._whole, values_RS, out=values_RS)
        values_RS.mul_(weight)
        piece.clear_padding(values_RS)
        if compressor is not None:
            compressor.encode(values_RS, sent.view(self._replicas, -1))

    def exchange(self, sent: Tensor) -> Tensor:
        """Sends it, makes the update of this replica's rows, and gathers: the new outer weights, [R, S], for `take`. Changes no
        state, and not `sent`. Called beside the training thread, too."""
        gradient_S = self._sum(sent)
        torch.add(gradient_S, self.momentum, alpha=self._spec.momentum, out=self._momentum_made)
        change_S = gradient_S.add_(self._momentum_made, alpha=self._spec.momentum).mul_(self._spec.lr)
        self._result = torch.empty(self._replicas, self._piece.size, device=self._device)
        if self._compressor is None:
            self._all_gather(self._result, self.outer - change_S)
            return self._result
        encoded_B = torch.empty(1, self._compressor.row_bytes(self._piece.size), dtype=torch.uint8, device=self._device)
        self._compressor.encode(change_S[None], encoded_B)
        self._came = torch.empty(self._replicas, encoded_B.shape[1], dtype=torch.uint8, device=self._device)
        self._all_gather(self._came, encoded_B[0])
        self._compressor.decode(self._came, self._result)
        return torch.sub(self._whole, self._result, out=self._result)

    @torch.no_grad()
    def take(self, blend: float) -> None:
        """The result becomes the outer weights, and the replica's own but for a share `blend` of what they are now."""
        self.momentum.copy_(self._momentum_made)
        self._whole.copy_(self._result if self._compressor else self._result[self._row : self._row + 1])
        self._blend(self._result, blend)
        self._result = self._came = torch.empty(0)

    def _sum(self, sent: Tensor) -> Tensor:
        """[S]: this replica's rows of the outer gradient."""
        size, replicas = self._piece.size, self._replicas
        if self._compressor is not None:
            rows_RB = sent.view(replicas, -1)
            self._came = torch.empty_like(rows_RB)
            if self._group is None:
                self._came.copy_(rows_RB)
            else:
                gloo_p2p.all_to_all(self._came, rows_RB, self._group).wait()
            total_S = torch.zeros(size, device=self._device)
            self._compressor.add(self._came, total_S)
            return total_S
        values_RS = sent.view(torch.float32).view(replicas, size)
        if self._group is None:
            return self.outer - values_RS[0]
        mean_S = torch.empty(size, device=self._device)
        self._came = torch.empty_like(values_RS) if gloo_p2p.direct(self._group) else self._came
        gloo_p2p.reduce_scatter(mean_S, values_RS.view(-1), self._came, self._group).wait()
        return torch.sub(self.outer, mean_S, out=mean_S)

    def _all_gather(self, whole: Tensor, mine: Tensor) -> None:
        if self._group is None:
            whole[0].copy_(mine)
        else:
            gloo_p2p.all_gather(whole.view(-1), mine, self._group).wait()

    def _blend(self, rows_RS: Tensor, blend: float) -> None:
        for name, value in self._piece.of_parameters(rows_RS).items():
            local = self._locals[name]
            if blend:
                local.lerp_(value, 1.0 - blend)
            else:
                local.copy_(value)


def _beside(shard: ParamShard, mesh: Mesh) -> tuple[DeviceMesh, tuple[Shard, ...]]:
    """The mesh of a parameter's shard, with the replicas as its last dimension, along which the shard is split into rows. Without
    groups: nothing is sent along it."""
    device, here = mesh.rank.device.type, mesh.rank.rank
    if shard.like is None:
        return DeviceMesh(device, mesh.others, mesh_dim_names=("replica",), _init_backend=False), (Shard(0),)
    of_shard = shard.like.device_mesh
    ranks = torch.stack([of_shard.mesh + (other - here) for other in mesh.others], dim=-1)
    names = (*(of_shard.mesh_dim_names or (f"dim{n}" for n in range(of_shard.ndim))), "replica")
    made = DeviceMesh(device, ranks, mesh_dim_names=names, _init_backend=False)
    return made, (*shard.like.placements, Shard(0))  # type: ignore[arg-type]
