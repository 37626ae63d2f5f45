"""Reads the weights of a checkpoint without a model: one tensor at a time, or a part of one, whatever mesh saved it.

Runs in: commands that export weights, in one process. Torch, never ray. No more than a tensor and a buffer are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from raydist.checkpoint import retention
from raydist.checkpoint.huggingface import part_shape
from raydist.checkpoint.manifest import Manifest, TensorEntry
from raydist.checkpoint.source import MODEL
from raydist.errors import CheckpointNotFound
from raydist.run.directory import RunDir
from raydist.spec.huggingface import Piece
from raydist.worker.checkpoint import restore
from raydist.worker.checkpoint.shard_reader import ShardReader

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
        self._shards = ShardReader(run, manifest)

    def read(self, name: str, piece: Piece = WHOLE) -> Tensor:
        """The values of a piece of it, by default all, in the saved format on the CPU."""
        entry = self.manifest.tensors[MODEL + name]
        made = torch.empty(part_shape(piece, entry.shape), dtype=getattr(torch, entry.dtype))
        self._shards.read(MODEL + name, piece, made)
        return made

    def close(self) -> None:
        """Closes the files."""
        self._shards.close()
