"""Sums along one fixed binary tree, so that they have the same bits however their terms are spread over ranks.

Runs in: each train worker. Torch, never ray.

The terms are numbered. The left part of a node is the largest power of two below its length, so that any stretch of terms is made
of few nodes. Six terms, of which each of two ranks has three:

                   [0, 6)
             [0, 4)      [4, 6)         rank 0 folds (0 1) and has 2
         [0, 2) [2, 4)   4    5         rank 1 has 3, and folds (4 5)
        (0   1)(2) (3)  (4    5)

Terms may be in groups of the same length: each group has such a tree, and the groups' sums are the terms of one more.

IEEE addition is commutative, so that only the grouping counts: which of two children is added to the other changes nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from raydist.worker.comm import gloo_p2p

T = TypeVar("T")
Node = tuple[int, int]
"""Terms [first, last)."""


@dataclass(frozen=True, slots=True)
class Tree:
    """The tree over `groups` times `each` terms."""

    each: int
    groups: int = 1

    @property
    def count(self) -> int:
        """Of all terms."""
        return self.each * self.groups


@cache
def _beside(tree: Tree) -> Mapping[Node, tuple[Node, Node]]:
    """Of each node but the root: the node that it is added to, and their sum."""
    found: dict[Node, tuple[Node, Node]] = {}

    def add(first: int, last: int) -> None:
        if last - first > 1:
            unit = tree.each if last - first > tree.each else 1
            middle = first + unit * (1 << ((last - first) // unit - 1).bit_length() - 1)
            left, right = (first, middle), (middle, last)
            found[left], found[right] = (right, (first, last)), (left, (first, last))
            add(*left)
            add(*right)

    add(0, tree.count)
    return found


class Fold(Generic[T]):
    """Sums of terms that come in any order; of those that came it keeps the fewest nodes.

    `add(kept, came)`: gives their sum, and may do so in the memory of either.
    """

    def __init__(self, tree: Tree, add: Callable[[T, T], T]) -> None:
        self._beside, self._add = _beside(tree), add
        self._kept: dict[Node, T] = {}

    def push(self, node: Node, value: T) -> None:
        """One more term, or node."""
        assert node not in self._kept, node
        while self.joins(node):
            other, parent = self._beside[node]
            node, value = parent, self._add(self._kept.pop(other), value)
        self._kept[node] = value

    def joins(self, node: Node) -> bool:
        """Whether `push` would add it to what came before, and not keep it."""
        return node in self._beside and self._beside[node][0] in self._kept

    @property
    def nodes(self) -> list[tuple[Node, T]]:
        """The nodes that it keeps, in their order."""
        return sorted(self._kept.items(), key=lambda kept: kept[0])


def cover(tree: Tree, terms: Iterable[int]) -> list[Node]:
    """The fewest nodes that are made of these terms."""
    fold: Fold[None] = Fold(tree, lambda kept, came: None)
    for term in terms:
        fold.push((term, term + 1), None)
    return [node for node, _ in fold.nodes]


def in_place(kept: Tensor, came: Tensor) -> Tensor:
    """The sum, in the memory of `kept`."""
    return kept.add_(came)


def total(tree: Tree, terms: Sequence[float]) -> float:
    """The sum of all terms."""
    fold: Fold[float] = Fold(tree, operator.add)
    for number, term in enumerate(terms):
        fold.push((number, number + 1), term)
    return fold.nodes[0][1]


def halved(values_N: Tensor) -> Tensor:
    """The sum along the last dimension: the second half is added to the first until one is left. Each addition is element by
    element, so that neither the number of threads nor that of rows changes anything."""
    while (length := values_N.shape[-1]) > 1:
        half = -(-length // 2)
        rest = values_N[..., half:]
        values_N = values_N[..., :half].clone()
        values_N[..., : rest.shape[-1]] += rest
    return values_N.sum(-1)


class Exchange:
    """Each rank of a group sends its nodes' values, and gets its stretch of all nodes of all ranks. Started by the constructor.

    `nodes`: of each rank. `sent`: this rank's values, flat and contiguous, each of `sum(sizes)` numbers; `sizes[r]` of them go to
    rank r. `room`: for what arrives, of `room_for(nodes, sizes[rank])` numbers. Leave both alone until `wait` has returned.
    """

    def __init__(
        self,
        tree: Tree,
        nodes: Sequence[Sequence[Node]],
        sent: Sequence[Tensor],
        sizes: Sequence[int],
        room: Tensor,
        group: dist.ProcessGroup,
    ) -> None:
        rank = group.rank()
        assert len(sent) == len(nodes[rank]), (len(sent), nodes[rank])
        self._tree, self._nodes, self._mine = tree, nodes, sizes[rank]
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
        fold: Fold[Tensor] = Fold(self._tree, in_place)
        for rank, nodes in enumerate(self._nodes):
            for slot, node in enumerate(nodes):
                fold.push(node, self._came[slot][rank])
        return fold.nodes


@torch.no_grad()
def sum_flat(tensors: Iterable[Tensor | None], group: dist.ProcessGroup, device: torch.device) -> None:
    """Replaces each tensor by its sum over the ranks of `group`, on `device`. All ranks have the same shapes.

    The bits of an element depend on its terms alone: an all-reduce of three ranks adds them in an order that depends on its place.
    """
    held = [tensor for tensor in tensors if tensor is not None and tensor.numel()]
    if not held:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in held]).to(device)
    size, rank = group.size(), group.rank()
    if size == 2:
        dist.all_reduce(flat, group=group)
    else:
        rows = list(flat.tensor_split(size))
        sizes, nodes = [row.numel() for row in rows], [[(r, r + 1)] for r in range(size)]
        room = flat.new_empty(room_for(nodes, sizes[rank]))
        ((_, value),) = Exchange(Tree(size), nodes, [flat], sizes, room, group).wait()
        rows[rank].copy_(value)
        gloo_p2p.all_gather_rows(flat, rows, group).wait()
    for tensor, total in zip(held, torch.split(flat, [tensor.numel() for tensor in held]), strict=True):
        tensor.copy_(total.view_as(tensor))


def room_for(nodes: Sequence[Sequence[Node]], stretch: int) -> int:
    """Numbers that arrive at a rank whose stretch of a node has so many."""
    return sum(map(len, nodes)) * stretch
