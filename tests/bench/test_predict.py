"""The closed forms, against figures computed by hand and against one another."""

from __future__ import annotations

from typing import Any

import pytest

from raydist.bench import nccl
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


def test_what_nccl_should_take() -> None:
    """Against figures by hand. Trees and LL for small arrays on many nodes, a ring and Simple for large ones; within a node a ring
    for small ones, too. Only measured sums of fp32 count."""
    times = nccl.predict(0, 32, 4, 1e11)
    assert times["Tree", "LL"] == pytest.approx(6.8e-6 + 14 * 0.6e-6 + 4 * 5e-6)
    assert times["Ring", "LL"] == pytest.approx(6.6e-6 + 56 * 0.6e-6 + 6 * 2.7e-6)
    assert nccl.predict(1e9, 32, 4, 1e11)["Ring", "Simple"] == pytest.approx(62 / 32 / 100, rel=0.05)

    def row(op: str, size: int) -> dict[str, Any]:
        return {"op": op, "type": "fp32", "size": size, "busbw": min(1e11, 1e6 * size), "median": 1.0}

    rows = [row("all_reduce", 2**10), row("all_gather", 2**10), row("all_reduce", 2**30)]
    for nodes, small in ((4, ("Tree", "LL")), (1, ("Ring", "LL"))):
        made = nccl.expected(rows, 32, nodes)
        assert [(r["size"], r["algorithm"], r["protocol"]) for r in made] == [
            (2**10, *small),
            (2**30, "Ring", "Simple"),
        ]
        assert made[1]["measured"] == 1.0
    assert nccl.expected(rows[1:2], 32, 4) == []


def test_a_torus_of_one_row_is_a_ring() -> None:
    """In either orientation, and for a prime number of ranks; a row length that does not divide the ranks is refused."""
    assert torus_2d(N, 8, LINK, row=8) == pytest.approx(ring(N, 8, LINK))
    assert torus_2d(N, 8, LINK, row=1) == torus_2d(N, 8, LINK, row=8)
    assert torus_2d(N, 7, LINK) == pytest.approx(ring(N, 7, LINK))
    with pytest.raises(ValueError, match="3"):
        torus_2d(N, 8, LINK, row=3)
