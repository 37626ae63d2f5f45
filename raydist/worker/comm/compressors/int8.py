"""Gradients are sent as int8, with a scale for each 1024 of them, and summed in fp32.

Runs in: each train worker. Torch, never ray.

A row is [S int8, S/1024 scales in fp32]. The scale is the largest absolute value of a block over 127.

Shape suffixes: R rows, S numbers, N blocks of a row, K numbers of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from raydist.extension_plans import CompressorPlan
from raydist.worker.comm.compressors import Rows, scratch

BLOCK = 1024
PLAN = CompressorPlan(feedback=True, bits=8.0 + 32 / BLOCK, outer=True, loss_increase=0.0)


class Compressor(Rows):
    """Rounds to the nearest of 255 steps. Operations on whole rows: no Python for each block."""

    align = BLOCK

    def __init__(self, options: Mapping[str, Any]) -> None:
        """There are no options."""

    def row_bytes(self, size: int) -> int:
        """One byte a number, and four for each block."""
        return size + 4 * (size // BLOCK)

    def encode(self, values_RS: Tensor, into_RB: Tensor) -> None:
        """See `Rows.encode`. A block with a number that is not finite has a scale that is not finite."""
        values_RNK = values_RS.view(len(values_RS), -1, BLOCK)
        whole_RNK, scales_RN1 = scratch(values_RNK), _scales(into_RB, values_RNK.shape[1])
        # Two passes that read take less time than one that writes absolute values, and another one.
        least_RN1 = torch.amin(values_RNK, dim=2, keepdim=True)
        scale_RN1 = torch.amax(values_RNK, dim=2, keepdim=True)
        torch.maximum(scale_RN1, least_RN1.neg_(), out=scale_RN1).mul_(1 / 127).clamp_min_(1e-30)
        torch.mul(values_RNK, scale_RN1.reciprocal(), out=whole_RNK).round_()
        _numbers(into_RB, values_RNK.shape[1]).copy_(whole_RNK)
        scales_RN1.copy_(scale_RN1)
        values_RNK.addcmul_(whole_RNK, scale_RN1, value=-1)

    def decode(self, encoded_RB: Tensor, into_RS: Tensor) -> None:
        """See `Rows.decode`."""
        into_RNK = into_RS.view(len(into_RS), -1, BLOCK)
        blocks = into_RNK.shape[1]
        # Two passes in fp32 take less time than one that converts each number as it multiplies.
        into_RNK.copy_(_numbers(encoded_RB, blocks)).mul_(_scales(encoded_RB, blocks))

    def add(self, encoded_RB: Tensor, total_S: Tensor) -> None:
        """See `Rows.add`."""
        total_NK = total_S.view(-1, BLOCK)
        numbers, scales, row_NK = (
            _numbers(encoded_RB, len(total_NK)),
            _scales(encoded_RB, len(total_NK)),
            scratch(total_NK),
        )
        for whole_NK, scale_N1 in zip(numbers, scales, strict=True):
            total_NK.addcmul_(row_NK.copy_(whole_NK), scale_N1)


def _numbers(encoded_RB: Tensor, blocks: int) -> Tensor:
    return encoded_RB[:, : blocks * BLOCK].view(torch.int8).view(len(encoded_RB), blocks, BLOCK)


def _scales(encoded_RB: Tensor, blocks: int) -> Tensor:
    return encoded_RB[:, blocks * BLOCK :].view(torch.float32)[:, :, None]
