"""Sums along one fixed binary tree, so that they have the same bits however their terms are spread over ranks.

Runs in: each train worker. Torch, never ray.

The terms are numbered. The left part of a node is the largest power of two below its length, so that any stretch of terms is made
of few nodes. Six terms, of which each of two ranks has three:

                   [0, 6)
             [0, 4)      [4, 6)         rank 0 folds (0 1) and has 2
         [0, 2) [2, 4)   4    5         rank 1 has 3, and folds (4 5)
        (0   1)(2) (3)  (4    5)

IEEE addition is commutative, so that only the grouping counts: which of two children is added to the other changes nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from raydist.worker.comm import gloo_p2p

T = TypeVar("T")
Node = tuple[int, int]
"""Terms [first, last)."""


def _middle(first: int, last: int) -> int:
    return first + (1 << (last - first - 1).bit_length() - 1)


@cache
def cover(count: int, first: int, last: int) -> tuple[Node, ...]:
    """The fewest nodes of the tree over `count` terms that are made of the terms [first, last)."""

    def within(low: int, high: int) -> tuple[Node, ...]:
        if low >= last or high <= first:
            return ()
        if first <= low and high <= last:
            return ((low, high),)
        middle = _middle(low, high)
        return within(low, middle) + within(middle, high)

    return within(0, count)


@cache
def _children(count: int) -> frozenset[tuple[Node, Node]]:
    found: set[tuple[Node, Node]] = set()

    def add(low: int, high: int) -> None:
        if high - low > 1:
            middle = _middle(low, high)
            found.add(((low, middle), (middle, high)))
            add(low, middle)
            add(middle, high)

    add(0, count)
    return frozenset(found)


class Fold(Generic[T]):
    """Sums of terms that come in ascending order: `nodes` are the fewest nodes that are made of those that came.

    `add(left, right)`: gives their sum, and may do so in the memory of either.
    """

    def __init__(self, count: int, add: Callable[[T, T], T]) -> None:
        self._count, self._add = count, add
        self.nodes: list[tuple[Node, T]] = []

    def push(self, node: Node, value: T) -> None:
        """The next term, or the next node."""
        assert not self.nodes or self.nodes[-1][0][1] == node[0], (node, [n for n, _ in self.nodes])
        while self.nodes and (self.nodes[-1][0], node) in _children(self._count):
            (first, _), left = self.nodes.pop()
            node, value = (first, node[1]), self._add(left, value)
        self.nodes.append((node, value))

    def joins(self, node: Node) -> bool:
        """Whether `push` would add it to what came before, and not keep it."""
        return bool(self.nodes) and (self.nodes[-1][0], node) in _children(self._count)


def in_place(left: Tensor, right: Tensor) -> Tensor:
    """The sum, in the memory of `left`."""
    return left.add_(right)


def total(terms: Sequence[float]) -> float:
    """The sum of all terms along the tree."""
    fold: Fold[float] = Fold(len(terms), operator.add)
    for number, term in enumerate(terms):
        fold.push((number, number + 1), term)
    return fold.nodes[0][1]


def halved(values_N: Tensor) -> Tensor:
    """The sum of a vector, a scalar: the second half is added to the first until one is left. Each addition is element by element,
    so that the number of threads changes nothing."""
    while (length := values_N.numel()) > 1:
        half = -(-length // 2)
        rest = values_N[half:]
        values_N = values_N[:half].clone()
        values_N[: rest.numel()] += rest
    return values_N.sum()


class Exchange:
    """Each rank of a group sends its nodes' values, and gets its stretch of all nodes of all ranks. Started by the constructor.

    `nodes`: of each rank, ascending, and those of a rank after those of the rank before. `sent`: this rank's values, flat and
    contiguous, each of `sum(sizes)` numbers; `sizes[r]` of them go to rank r. `room`: for what arrives, of
    `room_for(nodes, sizes[rank])` numbers. Leave both alone until `wait` has returned.
    """

    def __init__(
        self,
        count: int,
        nodes: Sequence[Sequence[Node]],
        sent: Sequence[Tensor],
        sizes: Sequence[int],
        room: Tensor,
        group: dist.ProcessGroup,
    ) -> None:
        rank = group.rank()
        assert len(sent) == len(nodes[rank]), (len(sent), nodes[rank])
        self._count, self._nodes, self._mine = count, nodes, sizes[rank]
        self._works: list[gloo_p2p.Work] = []
        self._came: list[list[Tensor]] = []
        first, nothing = 0, room[:0]
        for slot in range(max(map(len, nodes))):  # ranks have different numbers of nodes
            into = [self._mine if len(theirs) > slot else 0 for theirs in nodes]
            came = room[first : first + sum(into)]
            first += came.numel()
            mine = sent[slot] if slot < len(sent) else nothing
            out = list(sizes) if slot < len(sent) else [0] * len(nodes)
            self._works.append(gloo_p2p.all_to_all(came, mine, group, into, out))
            self._came.append(list(torch.split(came, into)))

    def wait(self) -> list[tuple[Node, Tensor]]:
        """The fewest nodes that are made of all ranks' nodes, each this rank's stretch of it, in `room`."""
        for work in self._works:
            work.wait()
        fold: Fold[Tensor] = Fold(self._count, in_place)
        for rank, nodes in enumerate(self._nodes):
            for slot, node in enumerate(nodes):
                fold.push(node, self._came[slot][rank])
        return fold.nodes


def room_for(nodes: Sequence[Sequence[Node]], stretch: int) -> int:
    """Numbers that arrive at a rank whose stretch of a node has so many."""
    return sum(map(len, nodes)) * stretch
