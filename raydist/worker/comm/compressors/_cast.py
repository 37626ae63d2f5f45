"""Gradients in another floating-point format: what bf16 and fp16 have in common.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from raydist.worker.comm.compressors import Rows


class Cast(Rows):
    """Rounds each number to `dtype`."""

    dtype: torch.dtype
    align = 2  # a row of two bytes a number then begins at a multiple of four

    def __init__(self, options: Mapping[str, Any]) -> None:
        """There are no options."""

    def row_bytes(self, size: int) -> int:
        """Two bytes a number."""
        return size * self.dtype.itemsize

    def encode(self, values_RS: Tensor, into_RB: Tensor) -> None:
        """See `Rows.encode`."""
        rounded_RS = into_RB.view(self.dtype)
        rounded_RS.copy_(values_RS)
        values_RS.sub_(rounded_RS)

    def decode(self, encoded_RB: Tensor, into_RS: Tensor) -> None:
        """See `Rows.decode`."""
        into_RS.copy_(encoded_RB.view(self.dtype))
