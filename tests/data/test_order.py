"""The keyed permutation of sample ids."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.data.order import LARGEST, Permutation, epoch_order

KEYS = st.integers(0, 2**128 - 1)


@given(n=st.one_of(st.integers(1, 300), st.integers(4_000, 9_000)), key=KEYS)
@settings(max_examples=80, deadline=None)
def test_is_a_bijection(n: int, key: int) -> None:
    """Every id comes exactly once, for sizes with a table and above."""
    order = Permutation(n, key)
    ids = order(np.arange(n))
    assert np.array_equal(np.sort(ids), np.arange(n))


@given(n=st.integers(2**13, LARGEST), key=KEYS, data=st.data())
@settings(max_examples=150, deadline=None)
def test_large_orders_repeat_nothing(n: int, key: int, data: st.DataObject) -> None:
    """For any n up to 2**62, positions map to distinct ids in [0, n)."""
    positions = np.array(sorted({0, n - 1, *data.draw(st.lists(st.integers(0, n - 1), max_size=20))}))
    ids = Permutation(n, key)(positions)
    assert ids.dtype == np.int64
    assert ids.min() >= 0
    assert ids.max() < n
    assert len(set(ids.tolist())) == len(positions)


def test_values_never_change() -> None:
    """A checkpoint depends on the order: these values are the same in every version, on every machine, with every library."""
    golden = {
        10: Permutation(10, 1)(np.arange(6)).tolist(),
        10_000: Permutation(10_000, 2**127 + 3)(np.arange(6)).tolist(),
        10**11: epoch_order(17, 3, "abc", 10**11)(np.arange(4)).tolist(),
    }
    assert golden == {
        10: [0, 7, 8, 4, 2, 6],
        10_000: [285, 6668, 1151, 6473, 962, 474],
        10**11: [4624613310, 60299102075, 66839981239, 4801809919],
    }


def test_shape_and_size_of_a_call_do_not_matter() -> None:
    """One position at a time, or all in an array of any shape, gives the same ids."""
    order = Permutation(100_003, 5)
    together = order(np.arange(60).reshape(3, 20))
    assert together.shape == (3, 20)
    assert together.reshape(-1).tolist() == [int(order(i)) for i in range(60)]
    assert order(np.array([], dtype=np.int64)).shape == (0,)


@pytest.mark.parametrize("n", [5, 100_003])
@pytest.mark.parametrize("outside", [-1, "n"])
def test_rejects_what_is_outside(n: int, outside: int | str) -> None:
    """A position outside [0, n) raises IndexError; it does not wrap around."""
    value = n if outside == "n" else int(outside)
    with pytest.raises(IndexError):
        Permutation(n, 0)([0, value])


@pytest.mark.parametrize("changed", [(18, 0, "f"), (17, 1, "f"), (17, 0, "g")])
def test_each_argument_makes_another_order(changed: tuple[int, int, str]) -> None:
    """Orders that differ in seed, epoch or fingerprint agree at hardly any position."""
    positions = np.arange(20_000)
    first = epoch_order(17, 0, "f", 20_000)(positions)
    other = epoch_order(*changed, 20_000)(positions)
    assert np.count_nonzero(first == other) < 12  # 1 is expected


def _excess(counts: np.ndarray, expected: float) -> float:
    """By how many standard deviations chi-square exceeds its expected value."""
    freedom = counts.size - 1
    return (float(((counts - expected) ** 2).sum()) / expected - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_tiny_orders_are_uniform_over_all_permutations(n: int) -> None:
    """Over keys, all n! permutations are equally frequent, odd ones included."""
    trials = 6_000
    powers = n ** np.arange(n)
    seen = [int((Permutation(n, key)(np.arange(n)) * powers).sum()) for key in range(trials)]
    counts = np.unique(seen, return_counts=True)[1]
    assert counts.size == math.factorial(n)
    assert abs(_excess(counts, trials / counts.size)) < 4


@pytest.mark.parametrize("n", [4_097, 5_000, 8_193])
def test_small_networks_mix(n: int) -> None:
    """For sizes just above the table's limit, the id of a position is uniform over keys, alone and together with its
    neighbour's."""
    trials, bins = 3_000, 16
    firsts = np.array([Permutation(n, key)([0, 1, n - 1]) for key in range(trials)]) * bins // n
    for column in range(3):
        assert abs(_excess(np.bincount(firsts[:, column], minlength=bins), trials / bins)) < 4
    pairs = np.bincount(firsts[:, 0] * bins + firsts[:, 1], minlength=bins * bins)
    assert abs(_excess(pairs, trials / bins**2)) < 4


@pytest.mark.parametrize("n", [4_097, 65_536, 100_003, 10**11, LARGEST])
def test_one_order_looks_random(n: int) -> None:
    """Within one order, the ids of consecutive positions are spread evenly and are not correlated."""
    count, bins = min(n, 40_000), 20
    ids = Permutation(n, 99)(np.arange(count)).astype(np.float64) / n
    binned = (ids * bins).astype(np.int64)
    if n > count:
        assert abs(_excess(np.bincount(binned, minlength=bins), count / bins)) < 4
    steps = ((ids[1:] - ids[:-1]) % 1.0 * bins).astype(np.int64)
    assert _excess(np.bincount(steps, minlength=bins), (count - 1) / bins) < 4
    assert abs(float(np.corrcoef(ids[1:], ids[:-1])[0, 1])) < 4 / math.sqrt(count)
