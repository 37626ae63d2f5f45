"""The largest gradients of each row are sent, with their places; the others wait for a later step.

Runs in: each train worker. Torch, never ray.

A row is [k places in int32, k values in fp32]. A rank gets k numbers of its row from each rank, and sends the k largest of their
sum: the bytes do not grow with the number of ranks, as an all-gather of every rank's numbers would.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field
from torch import Tensor

from raydist.extension_plans import CompressorPlan
from raydist.spec.parts import Part, problem
from raydist.worker.comm.compressors import Rows, scratch

if TYPE_CHECKING:
    from raydist.spec import CommSpec


class Options(Part):
    """Options of topk."""

    ratio: float = Field(0.01, gt=0, le=1, description="Share of the gradients that is sent in a step.")


PLAN = CompressorPlan(
    feedback=True, bits=0.64, bits_of=lambda options, shapes: 64 * Options(**options).ratio, loss_increase=0.85
)


def check_spec(spec: CommSpec) -> None:
    """Raises SpecValueError without error feedback: what is not sent would be lost for good."""
    if spec.error_feedback is False:
        raise problem("error_feedback", False, "loses every gradient that topk does not send",
                      "leave it out")  # fmt: skip


class Compressor(Rows):
    """The numbers of a row with the largest absolute values."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._ratio = Options(**options).ratio

    def _count(self, size: int) -> int:
        return min(size, math.ceil(self._ratio * size))

    def row_bytes(self, size: int) -> int:
        """Eight bytes for each number that is sent."""
        return 8 * self._count(size)

    def encode(self, values_RS: Tensor, into_RB: Tensor) -> None:
        """See `Rows.encode`. NaN counts as the largest."""
        k = self._count(values_RS.shape[1])
        absolute_RS = torch.abs(values_RS, out=scratch(values_RS))
        places_Rk = torch.topk(absolute_RS, k, dim=1, sorted=False).indices
        into_RB[:, : 4 * k].view(torch.int32).copy_(places_Rk)
        into_RB[:, 4 * k :].view(torch.float32).copy_(values_RS.gather(1, places_Rk))
        values_RS.scatter_(1, places_Rk, 0.0)

    def decode(self, encoded_RB: Tensor, into_RS: Tensor) -> None:
        """See `Rows.decode`."""
        k = encoded_RB.shape[1] // 8
        places_Rk = encoded_RB[:, : 4 * k].view(torch.int32).long()
        into_RS.zero_().scatter_(1, places_Rk, encoded_RB[:, 4 * k :].view(torch.float32))

    def add(self, encoded_RB: Tensor, total_S: Tensor) -> None:
        """See `Rows.add`."""
        k = encoded_RB.shape[1] // 8
        for places_k, values_k in zip(
            encoded_RB[:, : 4 * k].view(torch.int32), encoded_RB[:, 4 * k :].view(torch.float32), strict=True
        ):
            total_S.index_add_(0, places_k, values_k)  # a row's places are distinct: the order has no effect
