"""The parts of a global batch, `train.virtual_ranks`: which rank computes which, in which order, and sums of whole gradients.

Runs in: each train worker. Torch, never ray. Sends nothing.

Ranks that reduce each part's gradient together (`together`) take parts in turn, so that after a turn the gradients of neighbours
are summed and one stretch of them is kept. Others have parts in a row, so that a rank adds up what it can before it sends.

    8 parts, 3 ranks      each by itself    rank 0: - 0 1     rank 1: 2 3 4     rank 2: 5 6 7
                          all together      rank 0: - 2 5     rank 1: 0 3 6     rank 2: 1 4 7

Every rank makes as many passes (zero3 gathers weights in each); where it has no part it computes a masked row, and the gradient is
dropped. That comes first: in its last pass every rank has a part.

Some ranks compute a gradient together, whatever the number of replicas: `context` parallel ranks, each with its own tokens; and
the replicas that share experts, whose parts are dealt out together (`unit` of them), so that an expert always gets the same rows in
a pass. Each place in such a set of ranks has terms of its own, which are a group of the tree (comm/tree.py).

    8 parts, 4 ranks, experts on 2      rank 0: 0 2   rank 1: 1 3   rank 2: 4 6   rank 3: 5 7
                                        terms of a dense weight     (0 2 4 6) (1 3 5 7)
                                        of an expert, on 2 and 2    (0+1) (2+3) (4+5) (6+7)
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
from raydist.worker.comm.tree import Fold, Node, Tree, cover, total


class Parts:
    """The parts of a rank, along the data axis of a strategy. `count`: of all parts; `rank`, `size`: of that axis; `together`:
    ranks of it that reduce the gradient of a part together, a divisor of `size`.

    `replicas`: of the model; None: as many as ranks. `unit`: neighbouring ones whose parts are computed together; it divides them.
    Raises UserError for more replicas than parts, and for parts that are no whole units.
    """

    def __init__(
        self, count: int, rank: int, size: int, together: int = 1, *, replicas: int | None = None, unit: int = 1
    ) -> None:
        self.count, self.rank, self.size, self.together = count, rank, size, together
        self.unit, self._replicas = unit, size if replicas is None else replicas
        if self._replicas > count:
            raise UserError(
                f"train.virtual_ranks: {count}: {self._replicas} workers (replicas of the model) are more than there are parts",
                f"take at most {count}, or start a run with more virtual ranks",
            )
        if count % unit:
            raise UserError(
                f"train.virtual_ranks: {count}: parts are computed by {unit} replicas together, which share experts, and these do "
                "not divide it",
                f"take a multiple of {unit}",
            )
        self._sets = self._replicas // unit
        self._places = size // self._sets
        turning = together // self._places
        self._turning = turning if together % self._places == 0 and turning and self._sets % turning == 0 else 1
        """Sets of ranks that take units in turn."""
        self.tree = Tree(count // unit, self._places)
        self.own = self.of_rank(rank)
        """This rank's terms of the tree in the order of its passes; None: no part."""
        self.running = False
        """Whether a micro-batch has begun: passes before are no training."""
        self.round = 0
        """Which of `own` is computed."""
        self.begins = self.ends = self.last = False
        """Whether a micro-batch is the first or the last of its part, and the last of the step."""
        self._others: list[Parts] = []

    def for_experts(self, rank: int, size: int, together: int) -> Parts:
        """The same parts along the data axis of the strategy of experts. `enter` is for both."""
        made = Parts(self.count, rank, size, together, replicas=self._replicas, unit=self.unit)
        made._turning, made.own = self._turning, []
        made.own = made.of_rank(rank)
        self._others.append(made)
        return made

    @property
    def term(self) -> int | None:
        """The term that is computed."""
        return self.own[self.round]

    def _units(self, number: int) -> list[int | None]:
        """The units of a set of ranks, in the order of their passes."""
        count, copies = self.tree.each, self._sets // self._turning

        def of_copy(copy: int) -> tuple[int, int]:
            return copy * count // copies, (copy + 1) * count // copies

        copy, place = divmod(number, self._turning)
        first, last = of_copy(copy)
        turns = -(-(last - first) // self._turning)
        before = first - (turns * self._turning - (last - first))  # as if the first turn were full
        most = -(-max(b - a for a, b in map(of_copy, range(copies))) // self._turning)
        own: list[int | None] = [None] * (most - turns)
        for turn in range(turns):
            unit = before + turn * self._turning + place
            own.append(None if turn == 0 and unit < first else unit)
        return own

    def of_rank(self, rank: int) -> list[int | None]:
        """The terms of any rank, in the order of its passes."""
        number, place = divmod(rank, self._places)
        return [None if unit is None else place * self.tree.each + unit for unit in self._units(number)]

    def of_replica(self, replica: int) -> list[int | None]:
        """The parts of any replica of the model, in the order of its passes."""
        number, place = divmod(replica, self.unit)
        return [None if unit is None else unit * self.unit + place for unit in self._units(number)]

    def nodes(self, ranks: Sequence[int], turn: int) -> list[list[Node]]:
        """Of each of these ranks: its term in a turn."""
        terms = (self.of_rank(rank)[turn] for rank in ranks)
        return [[] if term is None else [(term, term + 1)] for term in terms]

    def nodes_of_copies(self) -> list[list[Node]]:
        """Of all copies, of so many ranks as are `together`: the nodes that are made of its terms."""
        return [
            cover(
                self.tree,
                (t for rank in range(first, first + self.together) for t in self.of_rank(rank) if t is not None),
            )
            for first in range(0, self.size, self.together)
        ]

    def divide(self, of_part: Divide) -> Divide:
        """The micro-batches of a replica: those of its parts, in order. `of_part`: divides a global batch among the parts."""

        def divide(ids: IntArray, rank: int, world: int) -> list[IntArray]:
            own = [None if part is None else of_part(ids, part, self.count) for part in self.of_replica(rank)]
            each = next(len(batches) for batches in own if batches is not None)
            nothing = [np.empty(0, dtype=np.int64)] * each
            return [batch for batches in own for batch in (nothing if batches is None else batches)]

        return divide

    def spread(self, sums: Sequence[float]) -> list[float]:
        """A place for each term of the loss, in place of the first of these sums."""
        return [0.0] * self.tree.count + list(sums[1:])

    def joined(self, sums: Sequence[float]) -> list[float]:
        """The inverse of `spread`, after the sum over the ranks: to each term the others have added zeros."""
        return [total(self.tree, sums[: self.tree.count]), *sums[self.tree.count :]]

    def enter(self, index: int, micro_batches: int) -> None:
        """Micro-batch `index` of so many begins."""
        each = micro_batches // len(self.own)
        assert each * len(self.own) == micro_batches, (micro_batches, self.own)
        self.running = True
        self.round, within = divmod(index, each)
        self.begins, self.ends = within == 0, within == each - 1
        self.last = index == micro_batches - 1
        for other in self._others:
            other.enter(index, micro_batches)


def add_loss(sums: Tensor, loss: Tensor, parts: Parts | None) -> None:
    """Adds a micro-batch's loss to the first of `sums`, or to its term."""
    if parts is None:
        sums[0] += loss.detach()
    elif parts.term is not None:
        sums[parts.term] += loss.detach()


class WholeSums:
    """Sums of the whole gradients of this rank's parts, of parameters that are whole."""

    def __init__(self, parts: Parts, parameters: Sequence[nn.Parameter]) -> None:
        self._parts, self._parameters = parts, list(parameters)
        self._numbers = {id(p): number for number, p in enumerate(self._parameters)}
        self._add: Callable[[list[Tensor], list[Tensor]], list[Tensor]] = _add_lists
        self.clear()

    def clear(self) -> None:
        """Forgets the parts before: the step ends, or begins again."""
        self._before: Fold[list[Tensor]] = Fold(self._parts.tree, self._add)

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Around a micro-batch. The gradient of a part that is not this rank's last is taken away and added to those before."""
        yield
        parts = self._parts
        if not parts.running or not parts.ends or parts.last:
            return
        if parts.term is not None and self._parameters:
            found = [p.grad for p in self._parameters]
            grads = [grad for grad in found if grad is not None]
            assert len(grads) == len(found), "the graph check found a gradient for every parameter"
            self._before.push((parts.term, parts.term + 1), grads)
        for p in self._parameters:
            p.grad = None

    def nodes_with(self, parameters: Sequence[Tensor], last: Sequence[Tensor]) -> list[list[Tensor]]:
        """The nodes that this rank's parts make, of some parameters. `last`: their gradients of the last part, which is complete;
        the nodes that it is part of are added to it, and it is the last result."""
        term = self._parts.term
        assert term is not None, "in its last pass every rank has a part"
        numbers = [self._numbers[id(p)] for p in parameters]
        fold: Fold[list[Tensor]] = Fold(self._parts.tree, lambda kept, came: _add_lists(came, kept))
        for node, grads in self._before.nodes:
            fold.push(node, [grads[number] for number in numbers])
        fold.push((term, term + 1), list(last))
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
def _add_lists(into: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    torch._foreach_add_(into, others)
    return into
