"""First weights from a folder in Hugging Face's format: each rank reads its own part of each parameter, straight into its shard.

Runs in: each train worker. Torch, never ray.

Ranks of a tensor group have parts of each row of some tensors: in an object, thousands of short ranges. There each reads some of
the rows whole, as one range, and sends the others their parts.

The model is built without values (`leave_empty`), split and wrapped as always, and `load` then fills what the rank has of it, as a
checkpoint would: so no rank ever has the whole model, whatever the strategy and the mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from raydist.checkpoint.huggingface import check, format_for, overlap
from raydist.spec import ModelSpec
from raydist.storage import Storage
from raydist.worker.comm import gloo_p2p
from raydist.worker.mesh import Mesh
from raydist.worker.parallel import ParamShard
from raydist.worker.parallel._cut import Cut
from raydist.worker.parallel._model_graph import plain_name
from raydist.worker.weight_files import WeightFiles


def leave_empty(model: nn.Module) -> None:
    """Lets `initialise` give a model on the meta device zeros, which take no memory until something is written to them."""
    model.init_module = lambda name, module: None  # type: ignore[assignment]
    model.stays_empty = True  # type: ignore[assignment]


@torch.no_grad()
def load(
    spec: ModelSpec, model: nn.Module, shards: Mapping[str, ParamShard], vocab_size: int, mesh: Mesh | None = None
) -> int:
    """Fills `shards`, and the persistent buffers of `model`, from the folder `spec.hf`; returns the bytes that were read.

    Parameters that no file has (adapters) are left as they are. `vocab_size`: of the tokenizer. With `mesh` the ranks of a tensor
    group read from an object store together; else nothing is sent. Raises UserError, the same on every rank, if the tensors are
    others; StorageError if an object store refuses a read.
    """
    assert spec.hf is not None
    folder, format = Storage(spec.hf), format_for(spec)
    shapes = format.shapes(spec, spec.rows(vocab_size))
    buffers = {plain_name(name): buffer for name, buffer in model.named_buffers()}
    parts = [(name, shard.local.detach(), *_place(shard)) for name, shard in shards.items() if name in shapes]
    parts += [(name, b, (0,) * b.ndim, tuple(b.shape)) for name, b in buffers.items() if name in shapes]
    with WeightFiles(folder, check(folder, spec, format, shapes)) as files:
        for name, local, offset, size in parts:
            copy = _copy
            if mesh is not None and folder.local is None and name in shards and shards[name].columns[1] > 1:
                copy = partial(_share, mesh=mesh)
            for piece in format.pieces(name, shapes[name]):
                common = overlap(piece, shapes[name], offset, size)
                if common is not None:
                    copy(files, piece.name, common[0], local[common[1]])
    return files.nbytes


def _place(shard: ParamShard) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offset, size) of a shard in its parameter."""
    if shard.like is None:
        return (0,) * shard.local.ndim, tuple(shard.local.shape)
    size, offset = compute_local_shape_and_global_offset(
        shard.like.shape, shard.like.device_mesh, shard.like.placements
    )
    return tuple(offset), tuple(size)


def _copy(files: WeightFiles, name: str, where: tuple[slice, ...], into: Tensor) -> None:
    """Reads a part of a file's tensor, some rows at a time."""
    if into.ndim == 0:
        into.copy_(files.read(name))
        return
    rows = files.rows(name)
    for at in range(0, len(into), rows):
        first, n = where[0].start + at, min(rows, len(into) - at)
        into[at : at + n].copy_(files.read(name, (slice(first, first + n), *where[1:])))


def _share(files: WeightFiles, name: str, where: tuple[slice, ...], into: Tensor, mesh: Mesh) -> None:
    """The same for a matrix of whose rows each rank of the tensor group has a part: each reads some of them whole."""
    group = mesh.group("tensor")
    assert group is not None, "the ranks that have the other parts"
    width = files.tensors[name].shape[1]
    widths = Cut(1, torch.Size((0, width))).sizes(mesh.tensor)
    most, own = files.rows(name) * mesh.tensor, mesh.tensor_rank
    for at in range(0, len(into), most):
        n = min(most, len(into) - at)
        ends = [n * r // mesh.tensor for r in range(mesh.tensor + 1)]
        counts = [stop - start for start, stop in pairwise(ends)]
        first = where[0].start + at + ends[own]
        into_each, to_each = [count * widths[own] for count in counts], [counts[own] * w for w in widths]
        rows = files.read(name, (slice(first, first + counts[own]), slice(0, width)))
        sent = rows.new_empty(rows.numel())
        for to, part in zip(torch.split(sent, to_each), torch.split(rows, widths, 1), strict=True):
            to.view(part.shape).copy_(part)
        del rows  # two buffers of a rank's share of the rows at a time: one tensor at most
        sent = sent.to(mesh.rank.device)
        came = sent.new_empty(n * widths[own])
        gloo_p2p.all_to_all(came, sent, group, into_each, to_each).wait()
        into[at : at + n].copy_(came.view(n, -1))
