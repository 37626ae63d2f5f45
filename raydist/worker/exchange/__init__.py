"""The exchanges, which send the rows of tokens to the ranks of their experts and back: one file each, found by name.

Runs in: each train worker. Torch, never ray. This docstring is their contract.

An exchange is a file here (`parallel.exchange: all_to_all`), or your own `package.module:attribute`, and has

    build(group: ProcessGroup) -> Exchange

- An Exchange is called with rows_RD, sorted by expert; with counts_E (int64), the rows that each of all E experts gets from this
  rank; and with `experts`, which is called with rows sorted by expert and the counts of this rank's experts, and gives as many
  rows. It returns outputs in the order of rows_RD. Rank r of the group has the experts r E/W to (r + 1) E/W - 1.
- Backward gives the rows' gradients, and runs the experts' backward on every rank, also on one that got no rows.
- Rows of an expert are in the order of the ranks that sent them: two runs have the same bits.
- `sent`: bytes of rows that this rank has sent to others since it was built, in forward and backward passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

from torch import Tensor

from raydist import registry

if TYPE_CHECKING:
    import torch.distributed as dist


class Exchange(Protocol):
    """See the contract above."""

    sent: int

    def __call__(self, rows_RD: Tensor, counts_E: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The outputs of the experts of all ranks for these rows."""


def build(name: str, group: dist.ProcessGroup) -> Exchange:
    """The exchange of this name. Raises ExtensionNotFound."""
    return cast("Callable[[dist.ProcessGroup], Exchange]", registry.load("exchange", name))(group)
