"""Parts of the tensors in a folder of Hugging Face's format: local files are mapped, an object store's are read by ranges of bytes.

Runs in: each train worker, and commands that export weights. Torch, never ray.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from raydist.checkpoint.huggingface import DTYPES, FileTensor
from raydist.errors import StorageError
from raydist.storage import Storage, refused

READ_BYTES = 64 << 20
"""Of a tensor at a time."""
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class WeightFiles(ExitStack):
    """A file is opened when its first tensor is read, and closed with the block. `nbytes`: read so far."""

    def __init__(self, folder: Storage, tensors: Mapping[str, FileTensor]) -> None:
        super().__init__()
        self.nbytes = 0
        self._folder, self.tensors = folder, tensors
        self._opened: dict[str, Any] = {}

    def rows(self, name: str) -> int:
        """How many rows, along the first dimension, have at most READ_BYTES; at least one."""
        return max(1, READ_BYTES // max(1, math.prod(self.tensors[name].shape[1:]) * 4))

    def read(self, name: str, where: tuple[slice, ...] = ()) -> Tensor:
        """A part of a tensor, in the file's format; () is the whole. Slices have a start and a stop. Raises StorageError."""
        tensor = self.tensors[name]
        if self._folder.local is not None:
            if tensor.file not in self._opened:
                opened = safe_open(self._folder.local / tensor.file, framework="pt")
                self._opened[tensor.file] = self.enter_context(opened)
            part: Tensor = self._opened[tensor.file].get_slice(name)[where or slice(None)]
            self.nbytes += part.nbytes
            return part
        try:
            return self._ranged(tensor, where)
        except StorageError:
            raise
        except OSError as error:
            raise refused("read", f"{self._folder.uri}/{tensor.file}", error) from error

    def _ranged(self, tensor: FileTensor, where: tuple[slice, ...]) -> Tensor:
        """Rows are adjacent in the file: those of the part are read whole, and then cut."""
        if tensor.file not in self._opened:
            self._opened[tensor.file] = self.enter_context(self._folder.open(tensor.file))
        stream, shape = self._opened[tensor.file], tensor.shape
        first, n = (where[0].start, where[0].stop - where[0].start) if where else (0, shape[0] if shape else 1)
        row = math.prod(shape[1:]) * DTYPES[tensor.dtype]
        data = bytearray(n * row)
        stream.seek(tensor.start + first * row)
        if stream.readinto(data) != len(data):
            raise OSError("it has become shorter")
        self.nbytes += len(data)
        rows = torch.frombuffer(data, dtype=_DTYPES[tensor.dtype]).view(n, *shape[1:])
        return rows[(slice(None), *where[1:])] if where else rows.view(shape)
