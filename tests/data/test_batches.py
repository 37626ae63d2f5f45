"""Global batches, a rank's share of them, and the cursor: each sample exactly once, with any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.data.batches import Batches, Cursor, eval_batches, samples_hash, share
from raydist.errors import DataError

SAMPLES, GLOBAL, WORLD, MICRO = st.integers(1, 400), st.integers(1, 64), st.integers(1, 9), st.integers(1, 16)


def shared(batches: Batches, cursor: Cursor, world: int, micro: int) -> list[int]:
    """The ids that all ranks together train at a cursor, in the order of ranks."""
    ids = batches.ids(cursor)
    return [int(i) for rank in range(world) for part in share(ids, rank, world, micro) for i in part]


@given(
    n=SAMPLES,
    size=GLOBAL,
    worlds=st.lists(WORLD, min_size=1, max_size=4),
    micro=MICRO,
    seed=st.integers(0, 99),
)
@settings(max_examples=120, deadline=None)
def test_every_sample_of_an_epoch_exactly_once(n: int, size: int, worlds: list[int], micro: int, seed: int) -> None:
    """Over two epochs with a different number of ranks at every step, each sample is trained exactly once an epoch."""
    batches = Batches(n, size, seed, "f")
    cursor = Cursor()
    for epoch in range(2):
        trained: list[int] = []
        for step in range(batches.steps_per_epoch):
            assert cursor.epoch == epoch
            trained += shared(batches, cursor, worlds[step % len(worlds)], micro)
            cursor = batches.after(cursor)
        assert sorted(trained) == list(range(n))
    assert cursor == Cursor(2, 0)


@given(n=SAMPLES, size=GLOBAL, step=st.integers(0, 200), old=WORLD, new=WORLD, micro=MICRO)
@settings(max_examples=120, deadline=None)
def test_resumes_anywhere_with_any_number_of_ranks(
    n: int, size: int, step: int, old: int, new: int, micro: int
) -> None:
    """Another process with another number of ranks trains the same sequence from a cursor that was stored and loaded."""
    first = Batches(n, size, 3, "f")
    cursor = Cursor()
    for _ in range(step):
        cursor = first.after(cursor)
    assert first.at_step(step) == cursor
    second, resumed = Batches(n, size, 3, "f"), Cursor.from_dict(cursor.to_dict())
    for _ in range(4):
        assert shared(first, cursor, old, micro) == shared(second, resumed, new, micro)
        assert samples_hash(first.ids(cursor)) == samples_hash(second.ids(resumed))
        cursor, resumed = first.after(cursor), second.after(resumed)


@given(n=st.integers(1, 500), world=WORLD, micro=MICRO)
@settings(max_examples=200, deadline=None)
def test_shares_make_up_the_batch(n: int, world: int, micro: int) -> None:
    """The shares in the order of ranks are the batch; all ranks have equally many micro-batches, none above the given size."""
    ids = np.arange(n) * 7
    shares = [share(ids, rank, world, micro) for rank in range(world)]
    assert np.array_equal(np.concatenate([p for s in shares for p in s]), ids)
    assert len({len(s) for s in shares}) == 1
    sizes = [len(p) for s in shares for p in s]
    assert max(sizes) <= micro
    assert len(shares[0]) == -(-max(sum(len(p) for p in s) for s in shares) // micro)
    if n % (world * micro) == 0:
        assert set(sizes) == {micro}


def test_ids_do_not_depend_on_the_past() -> None:
    """The batch at sample 10^11 - 5 of an epoch is computed from the cursor alone, without walking through the epoch."""
    batches = Batches(10**11, 8, 0, "f")
    ids = batches.ids(Cursor(7, 10**11 - 5))
    assert len(ids) == 5
    assert batches.after(Cursor(7, 10**11 - 5)) == Cursor(8, 0)
    assert ids.tolist() == batches.order(7)(np.arange(10**11 - 5, 10**11)).tolist()


def test_samples_hash_is_of_little_endian_int64() -> None:
    """The hash is the xxh64 of the ids as little-endian int64, in order, so other programs can compute it."""
    assert samples_hash(np.array([1, 2, 3])) == samples_hash(np.array([1, 2, 3], dtype=">i8"))
    assert samples_hash(np.array([1, 2, 3])) == "8799e152e5c0cdfa"
    assert samples_hash(np.array([2, 1, 3])) != samples_hash(np.array([1, 2, 3]))


def test_no_sample_is_an_error() -> None:
    """A split too small for one window raises DataError."""
    with pytest.raises(DataError, match="no sample"):
        Batches(0, 8, 0, "f")


@given(n=st.integers(0, 300), batches=st.integers(1, 8), size=GLOBAL)
@settings(max_examples=80, deadline=None)
def test_eval_batches_are_fixed(n: int, batches: int, size: int) -> None:
    """The same distinct samples every time: as many as requested, or all if there are fewer."""
    made = eval_batches(n, batches, size)
    ids = [int(i) for part in made for i in part]
    assert len(ids) == len(set(ids)) == min(n, batches * size)
    assert all(0 <= i < n for i in ids)
    assert [p.tolist() for p in eval_batches(n, batches, size)] == [p.tolist() for p in made]
    assert all(len(p) == size for p in made[:-1])
