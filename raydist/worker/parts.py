"""The parts of a global batch, `train.virtual_ranks`: which rank computes which, in which order, and sums of whole gradients.

Runs in: each train worker. Torch, never ray. Sends nothing.

Ranks that reduce each part's gradient together (`together`) take parts in turn, so that after a turn the gradients of neighbours
are summed and one stretch of them is kept. Others have parts in a row, so that a rank adds up what it can before it sends.

    8 parts, 3 ranks      each by itself    rank 0: - 0 1     rank 1: 2 3 4     rank 2: 5 6 7
                          all together      rank 0: - 2 5     rank 1: 0 3 6     rank 2: 1 4 7

Every rank makes as many passes (zero3 gathers weights in each); where it has no part it computes a masked row, and the gradient is
dropped. That comes first: in its last pass every rank has a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from raydist.data.batches import Divide
from raydist.data.order import IntArray
from raydist.errors import UserError
from raydist.worker.comm.tree import Fold, Node, cover, total


class Parts:
    """The parts of a rank. `count`: of all parts; `together`: ranks that reduce the gradient of a part together; it divides `size`.

    Raises UserError for more ranks than parts.
    """

    def __init__(self, count: int, rank: int, size: int, together: int = 1) -> None:
        if size > count:
            raise UserError(
                f"train.virtual_ranks: {count}: {size} workers (replicas of the model) are more than there are parts",
                f"take at most {count}, or start a run with more virtual ranks",
            )
        self.count, self.rank, self.size, self.together = count, rank, size, together
        self.own = self.of_rank(rank)
        """This rank's parts in the order of its passes; None: no part."""
        self.running = False
        """Whether a micro-batch has begun: passes before are no training."""
        self.round = 0
        """Which of `own` is computed."""
        self.begins = self.ends = self.last = False
        """Whether a micro-batch is the first or the last of its part, and the last of the step."""

    @property
    def part(self) -> int | None:
        """The part that is computed."""
        return self.own[self.round]

    def of_copy(self, copy: int) -> tuple[int, int]:
        """The parts [first, last) of a number of ranks that are `together`, the first ones' at first."""
        copies = self.size // self.together
        return copy * self.count // copies, (copy + 1) * self.count // copies

    def of_rank(self, rank: int) -> list[int | None]:
        """The parts of any rank, in the order of its passes."""
        copy, place = divmod(rank, self.together)
        first, last = self.of_copy(copy)
        turns = -(-(last - first) // self.together)
        before = first - (turns * self.together - (last - first))  # as if the first turn were full
        most = -(-max(b - a for a, b in map(self.of_copy, range(self.size // self.together))) // self.together)
        own: list[int | None] = [None] * (most - turns)
        for turn in range(turns):
            part = before + turn * self.together + place
            own.append(None if turn == 0 and part < first else part)
        return own

    def nodes(self, ranks: Sequence[int], turn: int) -> list[list[Node]]:
        """Of each of these ranks, which are `together`: its part in a turn."""
        parts = (self.of_rank(rank)[turn] for rank in ranks)
        return [[] if part is None else [(part, part + 1)] for part in parts]

    def nodes_of_copies(self) -> list[list[Node]]:
        """Of all copies: the nodes that are made of its parts."""
        return [list(cover(self.count, *self.of_copy(copy))) for copy in range(self.size // self.together)]

    def divide(self, of_part: Divide) -> Divide:
        """The micro-batches of a rank: those of its parts, in order. `of_part`: divides a global batch among the parts."""

        def divide(ids: IntArray, rank: int, world: int) -> list[IntArray]:
            own = [None if part is None else of_part(ids, part, self.count) for part in self.of_rank(rank)]
            each = next(len(batches) for batches in own if batches is not None)
            nothing = [np.empty(0, dtype=np.int64)] * each
            return [batch for batches in own for batch in (nothing if batches is None else batches)]

        return divide

    def spread(self, sums: Sequence[float]) -> list[float]:
        """A place for each part's loss, in place of the first of these sums."""
        return [0.0] * self.count + list(sums[1:])

    def joined(self, sums: Sequence[float]) -> list[float]:
        """The inverse of `spread`, after the sum over the ranks: to each part's loss the others have added zeros."""
        return [total(sums[: self.count]), *sums[self.count :]]

    def enter(self, index: int, micro_batches: int) -> None:
        """Micro-batch `index` of so many begins."""
        each = micro_batches // len(self.own)
        assert each * len(self.own) == micro_batches, (micro_batches, self.own)
        self.running = True
        self.round, within = divmod(index, each)
        self.begins, self.ends = within == 0, within == each - 1
        self.last = index == micro_batches - 1


class WholeSums:
    """Sums of the whole gradients of this rank's parts, of parameters that are whole."""

    def __init__(self, parts: Parts, parameters: Sequence[nn.Parameter]) -> None:
        self._parts, self._parameters = parts, list(parameters)
        self._numbers = {id(p): number for number, p in enumerate(self._parameters)}
        self._add: Callable[[list[Tensor], list[Tensor]], list[Tensor]] = _add_lists
        self.clear()

    def clear(self) -> None:
        """Forgets the parts before: the step ends, or begins again."""
        self._before: Fold[list[Tensor]] = Fold(self._parts.count, self._add)

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Around a micro-batch. The gradient of a part that is not this rank's last is taken away and added to those before."""
        yield
        parts = self._parts
        if not parts.running or not parts.ends or parts.last:
            return
        if parts.part is not None and self._parameters:
            found = [p.grad for p in self._parameters]
            grads = [grad for grad in found if grad is not None]
            assert len(grads) == len(found), "the graph check found a gradient for every parameter"
            self._before.push((parts.part, parts.part + 1), grads)
        for p in self._parameters:
            p.grad = None

    def nodes_with(self, parameters: Sequence[Tensor], last: Sequence[Tensor]) -> list[list[Tensor]]:
        """The nodes that this rank's parts make, of some parameters. `last`: their gradients of the last part, which is complete;
        the nodes that it is part of are added to it, and it is the last result."""
        part = self._parts.part
        assert part is not None, "in its last pass every rank has a part"
        numbers = [self._numbers[id(p)] for p in parameters]
        fold: Fold[list[Tensor]] = Fold(self._parts.count, lambda left, right: _add_lists(right, left))
        fold.nodes = [(node, [grads[number] for number in numbers]) for node, grads in self._before.nodes]
        fold.push((part, part + 1), list(last))
        return [grads for _, grads in fold.nodes]

    @torch.no_grad()
    def finish(self) -> None:
        """On one rank: each parameter has the gradient of all parts."""
        if not self._parts.running or not self._parameters:
            return
        grads = [p.grad for p in self._parameters if p.grad is not None]
        assert len(grads) == len(self._parameters)
        (_,) = self.nodes_with(self._parameters, grads)
        self.clear()


@torch.no_grad()
def _add_lists(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    torch._foreach_add_(left, right)
    return left
