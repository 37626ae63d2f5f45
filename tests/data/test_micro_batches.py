"""The division of a global batch of documents into micro-batches: pure functions, whatever the lengths and the number of ranks."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.data.micro_batches import LEVELS, Shapes, divide, few_lengths

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=120).map(lambda x: np.array(x, dtype=np.int64))
SHAPES = st.builds(
    Shapes,
    max_tokens=st.integers(64, 400),
    longest=st.just(64),
    max_rows=st.one_of(st.none(), st.integers(1, 20)),
    multiple=st.sampled_from([1, 8]),
    lengths=st.sampled_from([(), (64,), (8, 24, 64)]),
)


def sizes(lengths: np.ndarray, parts: list[np.ndarray], shapes: Shapes) -> list[int]:
    """Padded tokens of these micro-batches, without empty ones."""
    return [int(np.prod(shapes.shape(lengths[part]))) for part in parts if len(part)]


@given(lengths=LENGTHS, world=st.integers(1, 9), shapes=SHAPES)
@settings(max_examples=300)
def test_each_sequence_once_within_the_budget(lengths: np.ndarray, world: int, shapes: Shapes) -> None:
    """Each sequence is in one micro-batch of one rank; rows and tokens are within their limits; all ranks have equally many
    micro-batches, as few as one rank alone would need, shared out; only where there are too few sequences is one empty."""
    dealt = divide(lengths, world, shapes)
    assert sorted(i for parts in dealt for part in parts for i in part) == list(range(len(lengths)))
    count = len(dealt[0])
    assert {len(parts) for parts in dealt} == {count}
    for part in itertools.chain(*dealt):
        rows, length = shapes.shape(lengths[part])
        assert rows * length <= shapes.max_tokens or (rows, length) == (1, shapes.longest)
        assert rows <= (shapes.max_rows or rows)
        assert len(part) <= rows
        assert not len(part) or length >= lengths[part].max()
        if shapes.lengths:
            assert (rows, length) in shapes.all()
    alone = len(divide(lengths, 1, shapes)[0])
    assert count == -(-alone // world)
    empty = sum(not len(part) for part in itertools.chain(*dealt))
    assert empty == max(count * world - len(lengths), 0)


@given(lengths=LENGTHS, world=st.integers(1, 9), shapes=SHAPES.filter(lambda s: not s.lengths))
@settings(max_examples=200)
def test_ranks_have_nearly_equal_tokens(lengths: np.ndarray, world: int, shapes: Shapes) -> None:
    """The padded tokens of two ranks differ by less than their largest micro-batch: the next one goes to the rank with the fewest,
    unless that rank has all its micro-batches."""
    dealt = divide(lengths, world, shapes)
    loads = [sum(sizes(lengths, parts, shapes)) for parts in dealt]
    largest = max(max(sizes(lengths, parts, shapes), default=0) for parts in dealt)
    assert max(loads) - min(loads) <= largest


def test_like_lengths_are_together() -> None:
    """Of documents of two lengths no micro-batch pads one to the other's length, and few documents still occupy all ranks."""
    shapes = Shapes(max_tokens=64, longest=64)
    lengths = np.array([4, 32] * 8)
    parts = [part for rank in divide(lengths, 2, shapes) for part in rank]
    assert all(len(set(lengths[part])) == 1 for part in parts)
    assert [sum(len(part) for part in rank) for rank in divide(np.array([10, 10, 10, 10]), 4, shapes)] == [1, 1, 1, 1]


@given(lengths=LENGTHS, world=st.integers(1, 5))
def test_the_budget_is_the_smallest_that_adds_no_micro_batch(lengths: np.ndarray, world: int) -> None:
    """Without a limit of rows, and before the largest are halved, one token less in the largest micro-batch would need one more."""
    shapes = Shapes(max_tokens=200, longest=64)
    dealt = divide(lengths, world, shapes)
    largest = max(s for parts in dealt for s in sizes(lengths, parts, shapes))
    if len(lengths) >= world * len(dealt[0]) and largest > lengths.max():
        smaller = Shapes(max_tokens=largest - 1, longest=64)
        assert len(divide(lengths, 1, smaller)[0]) > world * len(dealt[0])


def least_padding(histogram: np.ndarray, count: int, multiple: int) -> int:
    """The fewest padded tokens with `count` lengths, by trying all."""
    longest = len(histogram) - 1
    inner = range(multiple, longest, multiple)
    tried = []
    for chosen in itertools.combinations(inner, min(count - 1, len(inner))):
        lengths = np.array([*chosen, longest])
        tried.append(int(sum(histogram[n] * lengths[np.searchsorted(lengths, n)] for n in range(1, longest + 1))))
    return min(tried)


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=18),
    count=st.integers(1, 4),
    multiple=st.integers(1, 4),
)
@settings(max_examples=150)
def test_few_lengths_have_the_least_padding(counts: list[int], count: int, multiple: int) -> None:
    """No other choice of as many padded lengths has less padding; the last one is the longest length."""
    histogram = np.array([0, *counts], dtype=np.int64)
    lengths = few_lengths(histogram, count, multiple)
    assert lengths[-1] == len(counts)
    assert 1 <= len(lengths) <= count
    assert all(a < b for a, b in itertools.pairwise(lengths))
    assert all(n % multiple == 0 for n in lengths[:-1])
    ladder = np.array(lengths)
    padded = int(sum(n * ladder[np.searchsorted(ladder, i)] for i, n in enumerate(histogram)))
    assert padded == least_padding(histogram, count, multiple)


def test_a_long_range_has_few_candidates() -> None:
    """131,072 lengths are reduced to 512 candidates, so that the choice takes milliseconds; shapes stay few."""
    histogram = np.zeros(131_073, dtype=np.int64)
    histogram[[100, 5_000, 131_072]] = [1_000, 100, 1]
    lengths = few_lengths(histogram, 3, 8)
    assert lengths == (256, 5_120, 131_072)
    assert len(Shapes(262_144, 131_072, lengths=lengths).all()) <= LEVELS * 3
