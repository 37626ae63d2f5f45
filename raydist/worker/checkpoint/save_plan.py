"""Which bytes of which tensors a rank saves, and where in its shard they stand.

Runs in: each train worker. Torch, never ray.

What every rank holds whole (DDP) is cut into as many equal stretches as there are ranks: a pure function of names,
shapes and the number of ranks, so that nobody asks anybody. Of a sharded tensor (DTensor) each rank saves what it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from raydist.errors import CheckpointError

ALIGN = 64
"""Each part of a shard starts at a multiple of this: every dtype may be viewed in place."""
SPLIT_BYTES = 1 << 20
"""A tensor smaller than this is saved whole by one rank."""


@dataclass(frozen=True, slots=True)
class Part:
    """A box of the tensor `name`, which has the shape `shape`: bytes start..start+length of this rank's shard.

    `source` is that box in the tensor's own memory, not a copy.
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

    def write_item(self) -> WriteItem:
        """The same as torch.distributed.checkpoint plans it."""
        offsets = torch.Size(self.offsets)
        return WriteItem(
            index=MetadataIndex(self.name, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets, self.source.shape),
                properties=TensorProperties(dtype=self.source.dtype),
                size=torch.Size(self.shape),
            ),
        )


def aligned(n: int) -> int:
    """`n`, rounded up to a multiple of ALIGN."""
    return -(-n // ALIGN) * ALIGN


def rank_name(rank: int, name: str) -> str:
    """The name in the checkpoint of a tensor that is this rank's own."""
    return f"rank/{rank:05d}/{name}"


def aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Names of tensors that are another one's memory -> that one's name, as of tied weights: their bytes are saved once."""
    first: dict[tuple[object, ...], str] = {}
    found: dict[str, str] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor) and tensor.numel():
            place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if first.setdefault(place, name) != name:
                found[name] = first[place]
    return found


def plan(
    tensors: Mapping[str, Tensor],
    rank_tensors: Mapping[str, Tensor],
    rank: int,
    world_size: int,
    gather_bytes: int = 0,
) -> list[Part]:
    """This rank's parts, in the order of its shard. `tensors`: the same names on every rank; `rank_tensors`: its own.

    What every rank holds whole beside sharded tensors is rank 0's alone, if it is no more than `gather_bytes`: a rank then finds
    all of its state in two shards. Raises CheckpointError for a tensor that is not dense.
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
    tied = aliases(tensors)
    whole = {n: t for n, t in tensors.items() if not isinstance(t, DTensor) and n not in tied}
    sizes = [(n, t.shape, t.nbytes) for n, t in whole.items()]
    gathered = len(whole) + len(tied) < len(tensors) and sum(nbytes for _, _, nbytes in sizes) <= gather_bytes
    for name, first, last in (
        stretch(sizes, rank, world_size) if not gathered else stretch(sizes, 0, 1) if not rank else ()
    ):
        tensor = whole[name]
        source = tensor[first:last] if tensor.ndim else tensor
        add(name, tensor.shape, (first, *[0] * (tensor.ndim - 1)) if tensor.ndim else (), source)
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is not None:
            local = tensor.to_local()
            _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            if local.numel():  # a rank past the end of an uneven split holds nothing
                add(name, tensor.shape, offsets, local)
    for name, tensor in rank_tensors.items():
        add(rank_name(rank, name), tensor.shape, [0] * tensor.ndim, tensor)
    return parts


def stretch(
    tensors: Sequence[tuple[str, Sequence[int], int]], rank: int, world_size: int
) -> Iterator[tuple[str, int, int]]:
    """(name, first row, row after the last) of what `rank` saves of (name, shape, bytes): every row once over the ranks.

    The tensors lie in a row and are cut at equal distances; a small tensor is not cut but goes to where most of it lies.
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
