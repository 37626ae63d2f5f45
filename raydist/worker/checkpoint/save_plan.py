"""Which bytes of which tensors a rank saves, and their positions in its shard.

Runs in: each train worker. Torch, never ray.

Tensors that the same ranks hold whole (DDP: all ranks) are cut into equal stretches, one for each of these ranks: a pure function
of the table of all ranks' tensors (worker/parameter_table.py). Of a sharded tensor (DTensor) each rank saves the part that it
holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from raydist.errors import CheckpointError
from raydist.worker.parameter_table import Ranks, TensorTable

ALIGN = 64
"""Each part of a shard starts at a multiple of this: every dtype may be viewed in place."""
SPLIT_BYTES = 1 << 20
"""A tensor smaller than this is saved whole by one rank."""


@dataclass(frozen=True, slots=True)
class Part:
    """A box of the tensor `name`, whose whole shape is `shape`: bytes start..start+length of this rank's shard.

    `source` is the box in the tensor's own memory, not a copy.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    source: Tensor
    start: int

    @property
    def length(self) -> int:
        """Bytes."""
        return self.source.nbytes


def aligned(n: int) -> int:
    """`n`, rounded up to a multiple of ALIGN."""
    return -(-n // ALIGN) * ALIGN


def rank_name(rank: int, name: str) -> str:
    """The name in the checkpoint of a tensor of one rank alone. `rank`: the row-major index of its coordinate in the mesh."""
    return f"rank/{rank:05d}/{name}"


def aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Names of tensors that share another tensor's memory (tied weights) -> the other's name. Their bytes are saved once."""
    first: dict[tuple[object, ...], str] = {}
    found: dict[str, str] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor) and tensor.numel() and tensor.layout is torch.strided:
            place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if first.setdefault(place, name) != name:
                found[name] = first[place]
    return found


def plan(
    tensors: Mapping[str, Tensor], rank_tensors: Mapping[str, Tensor], table: TensorTable, gather_bytes: int = 0
) -> list[Part]:
    """This rank's parts, in the order of its shard. `tensors`: this rank's tensors of `table`; `rank_tensors`: of this rank alone.

    If there are sharded tensors too, whole tensors of up to `gather_bytes` are saved by the first of their ranks: another rank
    then finds all of its state in two shards. Raises CheckpointError for a tensor that is not dense.
    """
    parts: list[Part] = []
    start = 0

    def add(name: str, shape: Sequence[int], offsets: Sequence[int], source: Tensor) -> None:
        nonlocal start
        parts.append(Part(name, tuple(shape), tuple(offsets), source.detach(), start))
        start = aligned(start + source.nbytes)

    for name, tensor in {**tensors, **rank_tensors}.items():
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise CheckpointError(f"{name}: a tensor of layout {tensor.layout} cannot be saved", "keep its state dense")
    any_sharded = any(not row.is_whole for row in table.values())
    for ranks, sizes in _whole_by_ranks(table).items():
        if table.rank not in ranks:
            continue
        gathered = any_sharded and sum(nbytes for _, _, nbytes in sizes) <= gather_bytes
        index, count = (ranks.index(table.rank), len(ranks)) if not gathered else (0, 1)
        for name, first, last in stretch(sizes, index, count) if not gathered or table.rank == ranks[0] else ():
            tensor = tensors[name]
            source = tensor[first:last] if tensor.ndim else tensor
            add(name, tensor.shape, (first, *[0] * (tensor.ndim - 1)) if tensor.ndim else (), source)
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is not None:
            local = tensor.to_local()
            _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            if local.numel():  # after an uneven split the last ranks may hold nothing
                add(name, tensor.shape, offsets, local)
    for name, tensor in rank_tensors.items():
        add(rank_name(table.rank, name), tensor.shape, [0] * tensor.ndim, tensor)
    return parts


def _whole_by_ranks(table: TensorTable) -> dict[Ranks, list[tuple[str, tuple[int, ...], int]]]:
    """Ranks -> (name, shape, bytes) of the tensors that exactly these ranks hold whole. Aliases are left out."""
    found: dict[Ranks, list[tuple[str, tuple[int, ...], int]]] = {}
    for name, row in table.items():
        if row.is_whole and row.alias is None:
            found.setdefault(row.ranks, []).append((name, row.shape, row.nbytes))
    return found


def stretch(
    tensors: Sequence[tuple[str, Sequence[int], int]], rank: int, world_size: int
) -> Iterator[tuple[str, int, int]]:
    """(name, first row, row after the last) of the part of (name, shape, bytes) that `rank` saves: every row once over the ranks.

    The tensors are laid end to end and cut at equal distances; a small tensor is not cut: the rank with most of it saves it.
    """
    total = sum(nbytes for _, _, nbytes in tensors)
    position = 0
    for name, shape, nbytes in tensors:
        rows = shape[0] if shape else 1

        def cut(r: int, rows: int = rows, nbytes: int = nbytes, position: int = position) -> int:
            if r in (0, world_size) or not nbytes:
                return rows if r else 0
            share = (total * r / world_size - position) / nbytes
            if nbytes < SPLIT_BYTES:
                share = round(share)
            return min(max(round(share * rows), 0), rows)

        first, last = cut(rank), cut(rank + 1)
        if first < last or (rows == 0 and rank == 0):
            yield name, first, last
        position += nbytes
