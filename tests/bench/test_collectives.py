"""Collectives on real gloo ranks: sizes, bandwidths, and an exact count of wrong elements."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import pytest
import torch

from raydist.bench import collectives, verify
from raydist.bench.collectives import Row
from raydist.bench.options import DTYPES, OPS, Ask, read
from raydist.errors import UsageError
from raydist.worker.comm import links
from raydist.worker.distributed import Rank
from raydist.worker.metrics import device_clock
from tests.training import run


def measured(rank: Rank, sizes: list[int], dtype: str) -> list[Row]:
    """A row for each operation at each size."""
    return [collectives.measure(op, size, dtype, rank, 3) for op in OPS for size in sizes]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_operations(ranks: Any, world: int, dtype: str) -> None:
    """No element is wrong, sizes are whole elements per rank, algbw and busbw are computed with nccl-tests' factors."""
    every = run(ranks, measured, world, [4, 100_000], dtype)
    assert all(rows == every[0] for rows in every)
    itemsize = {"fp32": 4, "bf16": 2}[dtype]
    share = (world - 1) / world
    factors = dict(zip(OPS, (2 * share, share, share, 1, share, 1), strict=True))
    for i, row in enumerate(every[0]):
        assert row.op == OPS[i // 2]
        assert (row.type, row.wrong) == (dtype, 0)
        part = max((4, 100_000)[i % 2] // itemsize // world, 1)
        assert row.size == part * world * itemsize
        parts = row.op in ("all_gather", "reduce_scatter", "all_to_all")
        assert row.count == (part if parts else part * world)
        assert 1 <= row.iterations <= 3
        assert 0 < row.min <= row.median <= row.p99
        assert row.algbw == pytest.approx(row.size / row.median)
        assert row.busbw == pytest.approx(row.algbw * factors[row.op])


def spoiled(rank: Rank, op: str, how: str) -> int:
    """#wrong of a collective of 2100 elements with this error on rank 1."""
    made = collectives._Operation(op, 8400, torch.float32, rank)
    real = made._call

    def not_sent() -> None:
        made._given.zero_()
        real()

    def of_rank_2() -> None:
        other = Rank(2, rank.world_size, 2, rank.device, rank.backend, rank.node_ip, rank.control, ())
        verify.fill(made._given, collectives._Operation(op, 8400, torch.float32, other)._pattern)
        real()

    def two_elements() -> None:
        real()
        made._got[3:5] += 1

    if rank.rank == 1:
        made._call = {"not sent": not_sent, "rank 2's": of_rank_2, "two elements": two_elements}[how]
    return made.check()[0]


@pytest.mark.parametrize(
    ("op", "how", "expected"),
    [
        ("all_reduce", "two elements", 2),
        # A rank adds a nonzero value to two of three elements, so 1400 of 2100 differ.
        ("all_reduce", "not sent", 3 * 1400),
        ("reduce_scatter", "not sent", 1400),
        ("broadcast", "two elements", 2),
    ],
)
def test_what_is_wrong_is_counted(ranks: Any, op: str, how: str, expected: int) -> None:
    """The exact number over all ranks, equal on each: two changed elements, and a rank whose part is missing."""
    assert run(ranks, spoiled, 3, op, how) == [expected] * 3


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
def test_a_part_of_another_rank_is_wrong(ranks: Any, op: str) -> None:
    """Rank 1 sends rank 2's data: at least a third of the affected elements is counted as wrong."""
    of = {"all_reduce": 3 * 2100, "reduce_scatter": 2100, "all_gather": 3 * 700, "all_to_all": 3 * 700}[op]
    (first, *_), many = run(ranks, spoiled, 3, op, "rank 2's"), of // 3
    assert many <= first <= of


def test_numbers_are_exact_in_bf16() -> None:
    """Values are at most 251 for any number of ranks: sums and parts are exact in bf16; any two ranks' messages differ."""
    i = torch.arange(10_000)
    for world in (2, 5, 64, 1000):
        total = verify.total(world)(i)
        assert total.max() <= 251
        assert torch.equal(total.bfloat16().long(), total)
    terms = torch.stack([verify.term(r, 5)(i) for r in range(5)])
    assert torch.equal(terms.sum(0), verify.total(5)(i))
    assert (verify.message(3, 1)(i) != verify.message(4, 1)(i))[::2].all()
    assert (verify.message(3, 1)(i) != verify.message(3, 2)(i))[1::2].all()


def test_nan_is_wrong() -> None:
    """NaN in a buffer that was never written counts as wrong."""
    tensor = torch.full((10,), float("nan"))
    assert verify.wrong(tensor, verify.total(2)) == 10


def test_percentiles_and_sizes() -> None:
    """Nearest rank; sizes by factor, including the largest if the factor reaches it."""
    times = [float(t) for t in range(1, 101)]
    assert collectives.percentile(times, 0.5) == 50
    assert collectives.percentile(times, 0.99) == 99
    assert collectives.percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert collectives.sizes(1024, 2**28, 4) == [2**k for k in range(10, 29, 2)]
    assert collectives.sizes(1000, 3999, 2) == [1000, 2000]
    assert collectives.sizes(8, 8, 2) == [8]


def test_marks_are_times_between_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, measured with the host's clock."""
    ticks = iter([1.0, 3.0, 3.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    marks = device_clock.Marks(torch.device("cpu"))
    for _ in range(3):
        marks.mark()
    assert marks.seconds() == [2.0, 0.5]


@pytest.mark.parametrize("n", [2, 3, 8, 9])
def test_rounds_have_every_pair_once(n: int) -> None:
    """No rank is twice in a round, and the number of rounds is minimal."""
    made = links.rounds(n)
    assert sorted(pair for pairs in made for pair in pairs) == [(a, b) for a in range(n) for b in range(a + 1, n)]
    assert all(len({x for pair in pairs for x in pair}) == 2 * len(pairs) for pairs in made)
    assert len(made) == (n - 1 if n % 2 == 0 else n)


def test_pairs_within_nodes_at_the_same_time() -> None:
    """Each two ranks of a node once, no rank twice in a round, and no more rounds than the largest node needs; a node with one rank
    has none."""
    made = links.within(["a", "b", "a", "c", "a", "a", "c"])
    pairs = sorted(pair for each in made for pair in each)
    assert pairs == [(0, 2), (0, 4), (0, 5), (2, 4), (2, 5), (3, 6), (4, 5)]
    assert all(len({x for pair in each for x in pair}) == 2 * len(each) for each in made)
    assert len(made) == 3
    assert links.within(["a"]) == links.within(["a", "b"]) == []


def test_members_are_one_a_node() -> None:
    """The first rank of each node; for a single node all its ranks."""
    assert links.members(["a", "a", "b", "b"]) == ("nodes", [0, 2], ["a", "b"])
    assert links.members(["a", "a", "a"]) == ("ranks", [0, 1, 2], ["rank 0", "rank 1", "rank 2"])


def pairs(rank: Rank) -> dict[str, Any]:
    """The topology of these ranks on one host, and what the pairs within it reach."""
    inside = links.speeds(rank, links.within(["here"] * rank.world_size))
    return asdict(links.measure(rank)) | {"inside": {pair: links.speed(points) for pair, points in inside.items()}}


def test_the_matrix_of_pairs(ranks: Any) -> None:
    """Three ranks: symmetric, zero on the diagonal, the same on every rank; the fitted line has a positive slope."""
    every = run(ranks, pairs, 3)
    assert all(theirs == every[0] for theirs in every)
    made = every[0]
    for matrix in (made["latency"], made["bandwidth"]):
        for a in range(3):
            assert matrix[a][a] == 0
            assert all(matrix[a][b] == matrix[b][a] > 0 for b in range(3) if b != a)
    assert made["inside"].keys() == {(0, 1), (0, 2), (1, 2)}
    assert min(made["inside"].values()) > 0
    assert made["line"]["beta"] > 0  # 8 MiB take longer than 8 bytes


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"ops": ["all_reduced"]}, "operation 'all_reduced'"),
        ({"dtypes": ["fp8"]}, "type 'fp8'"),
        ({"ops": []}, "no operation"),
        ({"least": 2048, "most": 1024}, "sizes from 2048 to 1024"),
        ({"least": 0}, "sizes from 0"),
        ({"factor": 1}, "factor 1"),
        ({"iterations": 0}, "iterations 0"),
        ({"size": 8}, "'size'"),
    ],
)
def test_what_cannot_be_measured_is_refused(asked: dict[str, Any], message: str) -> None:
    """The error has the name, the value and the valid choices."""
    with pytest.raises(UsageError, match=message) as caught:
        read(asked)
    assert caught.value.hint
    assert isinstance(read({}), Ask)
