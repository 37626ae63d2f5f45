"""Pickles tensors as their bytes: torch's own way is torch.save for each of them, which takes a quarter of a millisecond."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


def dumps(value: object) -> bytes:
    """For `pickle.loads`. Tensors that share their memory come back apart."""
    into = io.BytesIO()
    _Pickler(into, pickle.HIGHEST_PROTOCOL).dump(value)
    return into.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        # Plain ones: not a parameter or a DTensor, which are subclasses.
        if type(value) is not torch.Tensor or value.requires_grad or value.is_sparse or value.device.type != "cpu":
            return NotImplemented
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (data, value.dtype, tuple(value.shape))


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
