"""The closed forms, against figures computed by hand and against one another."""

from __future__ import annotations

import pytest

from raydist.bench.predict import predict, ring, torus_2d
from raydist.worker.comm.buckets.model import AlphaBeta

LINK = AlphaBeta(alpha=1e-5, beta=1e-9)
N = 8_000_000  # 8 ms on the wire


@pytest.mark.parametrize(
    ("world", "expected"),
    [
        # alpha: 2, 2, 2, 2 messages; bytes: n each way.
        (2, {"ring": 8.02e-3, "tree": 16.02e-3, "halving_doubling": 8.02e-3, "torus_2d": 8.02e-3}),
        # ring 14 alpha + 14 ms; tree 6 (alpha + 8 ms); halving 6 alpha + 14 ms; torus 2 x 4: 2 (1 + 3) alpha + 14 ms.
        (8, {"ring": 14.14e-3, "tree": 48.06e-3, "halving_doubling": 14.06e-3, "torus_2d": 14.08e-3}),
        # No power of two: halving on 4 of 6 ranks, 4 alpha + 12 ms, and 2 (alpha + 8 ms) before and after; torus 2 x 3.
        (6, {"ring": 10e-5 + 40e-3 / 3, "tree": 48.06e-3, "halving_doubling": 28.06e-3, "torus_2d": 6e-5 + 40e-3 / 3}),
    ],
)
def test_by_hand(world: int, expected: dict[str, float]) -> None:
    """All four, for 2, 8 and 6 ranks."""
    assert predict(N, world, LINK) == pytest.approx(expected)


def test_what_each_is_for() -> None:
    """On 64 ranks: few messages are best for tiny sizes, few bytes for huge ones; a torus has fewer messages than a ring."""
    tiny, huge = predict(8, 64, LINK), predict(2**30, 64, LINK)
    assert min(tiny, key=lambda name: tiny[name]) in ("tree", "halving_doubling")
    assert tiny["torus_2d"] == pytest.approx(28e-5, rel=1e-3)
    assert tiny["ring"] == pytest.approx(126e-5, rel=1e-3)
    assert huge["ring"] < huge["tree"] / 5
    assert huge["torus_2d"] < huge["ring"]


def test_a_torus_of_one_row_is_a_ring() -> None:
    """In either orientation, and for a prime number of ranks; a row length that does not divide the ranks is refused."""
    assert torus_2d(N, 8, LINK, row=8) == pytest.approx(ring(N, 8, LINK))
    assert torus_2d(N, 8, LINK, row=1) == torus_2d(N, 8, LINK, row=8)
    assert torus_2d(N, 7, LINK) == pytest.approx(ring(N, 7, LINK))
    with pytest.raises(ValueError, match="3"):
        torus_2d(N, 8, LINK, row=3)
