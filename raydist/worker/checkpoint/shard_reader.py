"""Reads the shards that shard_writer.py wrote: of each tensor the part that is wanted, whatever mesh saved it.

Runs in: each train worker, and in commands that need weights. Torch, never ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from raydist.checkpoint.huggingface import overlap
from raydist.checkpoint.manifest import Chunk, Manifest, path
from raydist.run.directory import RunDir
from raydist.spec.huggingface import Piece

READ_BYTES = 64 << 20
"""Of a tensor at a time, where the bytes cannot be read into their place."""
OPEN_FILES = 64
"""At most: a checkpoint of many ranks has more files than a process may open."""


class ShardReader:
    """The tensors of a checkpoint. Hashes are not checked here: see restore.choose."""

    def __init__(self, run: RunDir, manifest: Manifest) -> None:
        self._run, self._manifest = run, manifest
        self._open: dict[str, Any] = {}

    @torch.no_grad()  # then a DTensor gives its part without torch's dispatch, which takes a millisecond
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Reads the values of these tensors, in place; of a DTensor the part that this rank has."""
        try:
            for name, tensor in tensors.items():
                at: tuple[slice, ...] = ()
                local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
                if isinstance(tensor, DTensor):
                    if tensor.device_mesh.get_coordinate() is None:
                        continue
                    shape, mesh, placements = tensor.shape, tensor.device_mesh, tensor.placements
                    _, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
                    at = tuple(slice(first, first + n) for first, n in zip(offsets, local.shape, strict=True))
                self.read(name, Piece("", at), local)
        finally:
            self.close()

    def read(self, name: str, piece: Piece, into: Tensor) -> None:
        """Reads a piece of a tensor, in the saved format."""
        entry = self._manifest.tensors[name]
        for chunk in entry.chunks:
            common = overlap(piece, entry.shape, chunk.offsets, chunk.sizes)
            if common is not None:
                self._copy(chunk, common[1], into[common[0]])

    def close(self) -> None:
        """Closes the files."""
        while self._open:
            self._open.popitem()[1].close()

    def _copy(self, chunk: Chunk, where: tuple[int | slice, ...], into: Tensor) -> None:
        """Reads a part of a chunk: into its place if that is whole rows of memory, else some of its rows at a time."""
        sizes = chunk.sizes or (1,)
        row_bytes = chunk.length // sizes[0]
        rows = where[0] if where else 0
        if isinstance(rows, int):
            into, rows = into[None], slice(rows, rows + 1)
        source = self._file(chunk.file)
        whole = (rows.stop - rows.start) * row_bytes
        if into.device.type == "cpu" and into.is_contiguous() and into.nbytes == whole:
            source.seek(chunk.start + rows.start * row_bytes)
            read_all(source, into.reshape(-1).view(torch.uint8).numpy())
            return
        most = max(1, READ_BYTES // row_bytes)
        for first in range(rows.start, rows.stop, most):
            count = min(most, rows.stop - first)
            raw = torch.empty(count * row_bytes, dtype=torch.uint8)
            source.seek(chunk.start + first * row_bytes)
            read_all(source, raw.numpy())
            box = raw.view(into.dtype).view(count, *sizes[1:])
            into[first - rows.start :][:count].copy_(box[(slice(None), *where[1:])])

    def _file(self, name: str) -> Any:
        if name not in self._open:
            if len(self._open) >= OPEN_FILES:
                self.close()
            self._open[name] = self._run.storage.open(path(self._manifest.step, name))
        return self._open[name]


def read_all(source: Any, into: np.ndarray) -> None:
    """Fills an array of bytes from a file. Raises EOFError."""
    rest = memoryview(into)  # type: ignore[arg-type]
    while rest:
        n = source.readinto(rest)
        if not n:
            raise EOFError(f"the file ends {len(rest)} bytes too early")
        rest = rest[n:]
