"""torch.distributed.checkpoint (DCP) on raydist's storage: reads the shards that dcp_storage.py wrote.

Runs in: each train worker. Torch, never ray. DCP's Metadata comes from the JSON of the manifest: nothing is unpickled.
"""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from raydist.checkpoint.manifest import Chunk, Manifest, path
from raydist.errors import CheckpointError
from raydist.run.directory import RunDir
from raydist.worker.checkpoint.agreement import plain_errors


class TensorPlanner(DefaultLoadPlanner):
    """Plans reads into existing tensors; unpickles nothing."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refused: DCP's own would unpickle it."""
        raise CheckpointError(f"{read_item.dest_index.fqn}: not a tensor, and only tensors are restored")


class ShardReader(StorageReader):
    """Reads the chunks of a plan into their tensors. The hashes were checked before (restore.choose)."""

    def __init__(self, run: RunDir, manifest: Manifest) -> None:
        self._run, self._manifest = run, manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: one reader serves one load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's Metadata, from the manifest's JSON."""
        tensors = self._manifest.tensors
        return Metadata(
            state_dict_metadata={
                name: TensorStorageMetadata(
                    TensorProperties(dtype=getattr(torch, entry.dtype)),
                    torch.Size(entry.shape),
                    [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks],
                )
                for name, entry in tensors.items()
            },
            storage_data={MetadataIndex(n, c.offsets): c for n, entry in tensors.items() for c in entry.chunks},
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Keeps the places of the chunks."""
        self._chunks: Mapping[MetadataIndex, Chunk] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads file by file, in the order of the bytes."""
        by_file: dict[str, list[tuple[Chunk, ReadItem]]] = defaultdict(list)
        for item in plan.items:
            if item.type is not LoadItemType.TENSOR:
                raise CheckpointError(f"{item.storage_index.fqn}: not a tensor, and only tensors are restored")
            chunk = self._chunks[item.storage_index]
            by_file[chunk.file].append((chunk, item))
        with plain_errors():
            for name, wanted in by_file.items():
                with self._run.storage.open(path(self._manifest.step, name)) as source:
                    for chunk, item in sorted(wanted, key=lambda w: w[0].start):
                        target = planner.resolve_tensor(item).detach()
                        self._fill(source, chunk, item, target)
                        planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _fill(self, source: Any, chunk: Chunk, item: ReadItem, target: Tensor) -> None:
        """Reads the rows of the chunk that contain the wanted box, and copies the box out of them."""
        sizes, start, length = list(chunk.sizes), chunk.start, chunk.length
        offsets = list(item.storage_offsets)
        if sizes and sizes[0]:
            row = length // sizes[0]
            start, length = start + offsets[0] * row, item.lengths[0] * row
            sizes[0], offsets[0] = item.lengths[0], 0
        if not length:
            return
        source.seek(start)
        if target.device.type == "cpu" and target.is_contiguous() and sizes == list(item.lengths):
            read_all(source, target.reshape(-1).view(torch.uint8).numpy())
            return
        rows = torch.empty(length, dtype=torch.uint8)
        read_all(source, rows.numpy())
        box = rows.view(target.dtype).view(sizes)
        for dim, (first, n) in enumerate(zip(offsets, item.lengths, strict=True)):
            box = box.narrow(dim, first, n)
        target.copy_(box)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """False: it cannot be selected by a path."""
        return False


def read_all(source: Any, into: np.ndarray) -> None:
    """Fills an array of bytes from a file. Raises EOFError."""
    rest = memoryview(into)  # type: ignore[arg-type]
    while rest:
        n = source.readinto(rest)
        if not n:
            raise EOFError(f"the file ends {len(rest)} bytes too early")
        rest = rest[n:]
