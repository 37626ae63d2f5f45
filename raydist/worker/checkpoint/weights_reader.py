"""Reads the weights of a checkpoint without a model: one tensor at a time, or a part of one, whatever mesh saved it.

Runs in: commands that export weights, in one process. Torch, never ray. No more than a tensor and a buffer are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from raydist.checkpoint import retention
from raydist.checkpoint.huggingface import overlap, part_shape
from raydist.checkpoint.manifest import Chunk, Manifest, TensorEntry, path
from raydist.checkpoint.source import MODEL
from raydist.errors import CheckpointNotFound
from raydist.run.directory import RunDir
from raydist.spec.huggingface import Piece
from raydist.worker.checkpoint import restore
from raydist.worker.checkpoint.dcp_reader import read_all

READ_BYTES = 64 << 20
"""Of a tensor at a time."""
OPEN_FILES = 64
"""At most: a checkpoint of many ranks has more files than a process may open."""
WHOLE = Piece("")

Read = Callable[[str, Piece], Tensor]
"""Name of a parameter, and a piece of it -> that part, in the saved format. An export gets its values through one of these: a
function around `WeightsReader.read` changes them, tensor by tensor."""


@contextmanager
def open_weights(run: RunDir, step: int | None) -> Iterator[WeightsReader]:
    """The weights of a committed checkpoint, all of whose hashes are right; it is not pruned meanwhile.

    `step`: None takes the newest good one. Raises CheckpointNotFound, CheckpointCorrupt.
    """
    found = restore.choose(run, step=step)
    if found is None:
        raise CheckpointNotFound(
            f"run {run.name} has no checkpoint yet", "train it up to its first one (checkpoint.every)"
        )
    with retention.leased(run, found.step):
        restore.release(run, found.step)
        reader = WeightsReader(run, found)
        try:
            yield reader
        finally:
            reader.close()


class WeightsReader:
    """Name of a parameter or persistent buffer of the model -> its values. Hashes are not checked here."""

    def __init__(self, run: RunDir, manifest: Manifest) -> None:
        self.manifest = manifest
        self.tensors: Mapping[str, TensorEntry] = {
            name.removeprefix(MODEL): entry for name, entry in manifest.tensors.items() if name.startswith(MODEL)
        }
        self._run = run
        self._open: dict[str, Any] = {}

    def read(self, name: str, piece: Piece = WHOLE) -> Tensor:
        """The values of a piece of it, by default all, in the saved format on the CPU."""
        entry = self.tensors[name]
        made = torch.empty(part_shape(piece, entry.shape), dtype=getattr(torch, entry.dtype))
        for chunk in entry.chunks:
            common = overlap(piece, entry.shape, chunk.offsets, chunk.sizes)
            if common is not None:
                self._copy(chunk, common[1], made[common[0]])
        return made

    def close(self) -> None:
        """Closes the files."""
        while self._open:
            self._open.popitem()[1].close()

    def _copy(self, chunk: Chunk, where: tuple[int | slice, ...], into: Tensor) -> None:
        """Copies a part of a chunk, some of its rows at a time."""
        sizes = chunk.sizes or (1,)
        row_bytes = chunk.length // sizes[0]
        rows = where[0] if where else 0
        if isinstance(rows, int):
            into, rows = into[None], slice(rows, rows + 1)
        source = self._file(chunk.file)
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
            self._open[name] = self._run.storage.open(path(self.manifest.step, name))
        return self._open[name]
