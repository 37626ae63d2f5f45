"""Micro-batches of sequences of like length: which sequences of a global batch are computed together, in which shape and where.

Runs anywhere: numpy only. Pure functions: every rank computes the division of the whole global batch, and takes its part.

    lengths of the global batch's sequences, longest first
        -> micro-batches of consecutive ones: rows x padded length within a budget of tokens
        -> the smallest budget with which the ranks have no more micro-batches each: all take nearly the same time
        -> ranks, each with equally many, the next largest one to the rank with the fewest tokens
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raydist.data.order import IntArray

LEVELS = 4
"""Where shapes are few, a micro-batch has the most rows of its length, or half, a quarter, an eighth of them."""
_CANDIDATES = 512
"""Padded lengths among which `few_lengths` chooses."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes that micro-batches may have.

    `max_tokens`: rows x padded length at most; `max_rows`: rows at most; `multiple`: of which padded lengths are multiples, except
    `longest`, the length of the longest sequence. `lengths`: the only padded lengths, ascending, the last of them `longest`; rows
    are then padded, too. Empty: any.
    """

    max_tokens: int
    longest: int
    max_rows: int | None = None
    multiple: int = 1
    lengths: tuple[int, ...] = ()

    def padded(self, lengths: npt.ArrayLike) -> IntArray:
        """Lengths of sequences -> the lengths to which they are padded."""
        x = np.asarray(lengths, dtype=np.int64)
        if self.lengths:
            ladder = np.array(self.lengths, dtype=np.int64)
            return ladder[np.searchsorted(ladder, x, side="left")]
        return np.minimum(-(-x // self.multiple) * self.multiple, self.longest)

    def rows(self, length: int, budget: int | None = None) -> int:
        """The most rows of a padded length, within `max_tokens`, or a smaller budget."""
        return max(1, min((budget or self.max_tokens) // length, self.max_rows or 1 << 62))

    def padded_rows(self, rows: int, length: int) -> int:
        """Rows of a micro-batch of `rows` sequences of a padded length."""
        if not self.lengths:
            return rows
        return min(n for n in self._levels(length) if n >= rows)

    def shape(self, lengths: npt.ArrayLike) -> tuple[int, int]:
        """(rows, padded length) of a micro-batch of sequences of these lengths; of an empty one the smallest shape."""
        x = np.asarray(lengths, dtype=np.int64)
        length = int(self.padded(x.max() if x.size else 1))
        return self.padded_rows(max(x.size, 1), length), length

    def all(self) -> list[tuple[int, int]]:
        """Every shape, where they are few: (rows, padded length)."""
        return [(rows, length) for length in self.lengths for rows in self._levels(length)]

    def budgets(self, least: int) -> range | list[int]:
        """The budgets to try, ascending, the last one `max_tokens`: from `least` tokens on, or those of the levels of rows."""
        if self.lengths:
            return [b for b in (self.max_tokens >> level for level in reversed(range(LEVELS))) if b >= least] or [
                self.max_tokens
            ]
        return range(self.max_tokens - (self.max_tokens - least) // self.multiple * self.multiple, self.max_tokens + 1,
                     self.multiple)  # fmt: skip

    def _levels(self, length: int) -> list[int]:
        most = self.rows(length)
        return sorted({-(-most // 2**level) for level in range(LEVELS)})


@dataclass(frozen=True, slots=True, order=True)
class _Part:
    """A micro-batch: sequences [start, stop) of those sorted by length. Ordered by size, the largest first."""

    negative_size: int
    start: int
    stop: int


def divide(lengths: IntArray, world: int, shapes: Shapes) -> list[list[IntArray]]:
    """The micro-batches of each rank, as positions in `lengths`: the lengths of a global batch's sequences, at least one. The
    largest comes first.

    Each position is in one of them. All ranks have equally many, the fewest that `shapes` allows; the last ones of a rank may be
    empty if there are too few sequences.
    """
    order = np.argsort(-lengths, kind="stable")
    padded = shapes.padded(lengths[order])
    starts = _cut(padded, shapes, shapes.max_tokens)
    count = -(-len(starts) // world)
    least = min(max(int(padded[0]), int(padded.sum()) // (count * world)), shapes.max_tokens)
    budgets = shapes.budgets(least)
    fits = bisect_left(budgets, True, key=lambda b: len(_cut(padded, shapes, b)) <= count * world)
    starts = _cut(padded, shapes, budgets[fits])
    dealt: list[list[IntArray]] = [[] for _ in range(world)]
    loads = [(0, rank) for rank in range(world)]  # of ranks that have fewer than `count`
    for part in _split(padded, starts, count * world, shapes):
        load, rank = heapq.heappop(loads)
        dealt[rank].append(order[part.start : part.stop])
        if len(dealt[rank]) < count:
            heapq.heappush(loads, (load - part.negative_size, rank))
    for mine in dealt:
        mine += [np.empty(0, dtype=np.int64)] * (count - len(mine))
    return dealt


def _cut(padded: IntArray, shapes: Shapes, budget: int) -> list[int]:
    """Where micro-batches start that each take as many sequences as fit. `padded`: descending. A larger budget makes no more."""
    starts, at = [], 0
    while at < len(padded):
        starts.append(at)
        at += shapes.rows(int(padded[at]), budget)
    return starts


def _split(padded: IntArray, starts: list[int], room: int, shapes: Shapes) -> list[_Part]:
    """These micro-batches, the largest first. While there are fewer than `room`, the largest is halved, so that no rank waits."""

    def part(start: int, stop: int) -> _Part:
        length = int(padded[start])
        return _Part(-shapes.padded_rows(stop - start, length) * length, start, stop)

    parts = [part(start, stop) for start, stop in zip(starts, [*starts[1:], len(padded)], strict=True)]
    heapq.heapify(parts)
    single: list[_Part] = []  # one sequence each: cannot be halved
    while parts and len(parts) + len(single) < room:
        largest = heapq.heappop(parts)
        middle = (largest.start + largest.stop) // 2
        if middle == largest.start:
            single.append(largest)
        else:
            heapq.heappush(parts, part(largest.start, middle))
            heapq.heappush(parts, part(middle, largest.stop))
    return sorted(parts + single)


def few_lengths(histogram: IntArray, count: int, multiple: int) -> tuple[int, ...]:
    """At most `count` padded lengths, ascending, with the least padding for a corpus that has `histogram[n]` sequences of n tokens.

    The last one is the longest length, `len(histogram) - 1`; the others are multiples of `multiple`. Exact by dynamic programming,
    over at most 512 candidates: of a longer range every second, third, ... multiple.
    """
    longest = len(histogram) - 1
    step = multiple * -(-longest // (multiple * _CANDIDATES))
    ends = np.unique(np.append(np.arange(step, longest, step, dtype=np.int64), longest))
    below = np.append(0, np.cumsum(histogram)[ends])  # sequences up to each candidate, and before the first
    # cost[j]: the fewest padded tokens of all sequences up to candidate j, with a number of lengths that grows by one each round.
    cost = ends * below[1:]
    chosen: list[IntArray] = []
    rows = np.arange(len(ends))
    for _ in range(min(count, len(ends)) - 1):
        # Row j, column i: the last length is ends[j], and the one before it ends[i].
        made = cost[None, :] + ends[:, None] * (below[1:][:, None] - below[1:][None, :])
        made[rows[:, None] <= rows[None, :]] = np.iinfo(np.int64).max
        before = made.argmin(axis=1)
        better = made[rows, before] < cost
        chosen.append(np.where(better, before, -1))
        cost = np.where(better, made[rows, before], cost)
    lengths, at = [longest], len(ends) - 1
    for before in reversed(chosen):
        if (at_before := int(before[at])) >= 0:
            at = at_before
            lengths.append(int(ends[at]))
    return tuple(sorted(lengths))
