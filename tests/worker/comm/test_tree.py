"""The tree of `train.virtual_ranks`, and who computes which part of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raydist.data.batches import equal_parts
from raydist.errors import UserError
from raydist.worker import numerics
from raydist.worker.build import refuse_running_statistics
from raydist.worker.comm.tree import Fold, cover, halved, total
from raydist.worker.optim.aligned import whole_vectors
from raydist.worker.parts import Parts


def nested(first: int, last: int) -> str:
    """The sum of terms as it is written, straight from the definition."""
    if last - first == 1:
        return str(first)
    left = 1
    while 2 * left < last - first:
        left *= 2
    return f"({nested(first, first + left)}+{nested(first + left, last)})"


@given(st.integers(1, 40), st.data())
def test_however_terms_are_spread_the_sum_is_the_same(count: int, data: st.DataObject) -> None:
    """Terms on any number of ranks, folded there and then together, give the one nested sum; a rank never keeps more than
    log2 + 1 of them."""
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
    together: Fold[str] = Fold(count, lambda left, right: f"({left}+{right})")
    for first, last in zip([0, *cuts], [*cuts, count], strict=True):
        own: Fold[str] = Fold(count, lambda left, right: f"({left}+{right})")
        for term in range(first, last):
            own.push((term, term + 1), str(term))
            assert first or len(own.nodes) <= count.bit_length()
        assert [node for node, _ in own.nodes] == list(cover(count, first, last))
        for node, value in own.nodes:
            together.push(node, value)
    assert [value for _, value in together.nodes] == [nested(0, count)]


@given(st.integers(1, 12), st.data())
def test_each_part_once_and_all_in_order(count: int, data: st.DataObject) -> None:
    """Every part is one rank's; in each turn the parts of a copy follow those before; in the last turn every rank has one; all
    ranks make as many passes; a batch's samples are those of the parts."""
    size = data.draw(st.integers(1, count))
    together = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    ranks = [Parts(count, rank, size, together) for rank in range(size)]
    assert sorted(part for each in ranks for part in each.own if part is not None) == list(range(count))
    assert len({len(each.own) for each in ranks}) == 1
    assert all(each.own[-1] is not None for each in ranks)
    for copy in range(size // together):
        of_copy = ranks[copy * together : (copy + 1) * together]
        turns = zip(*(each.own for each in of_copy), strict=True)
        assert [part for turn in turns for part in turn if part is not None] == list(range(*ranks[0].of_copy(copy)))
    ids = np.arange(3 * count)
    divide = equal_parts(2)
    for each in ranks:
        batches = each.divide(divide)(ids, each.rank, size)
        expected = [b.tolist() for p in each.own if p is not None for b in divide(ids, p, count)]
        assert [b.tolist() for b in batches if len(b)] == expected


def test_more_ranks_than_parts() -> None:
    """One clear error."""
    with pytest.raises(UserError, match=r"train.virtual_ranks: 2: 3 workers .* are more than there are parts"):
        Parts(2, 0, 3)


def test_sums_do_not_depend_on_threads() -> None:
    """Of the norms of rows, and of a long vector, with one thread and with three; torch's own sum of the vector may."""
    values = torch.randn(100_003, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows = torch.randn(300, 1001, generator=torch.Generator().manual_seed(2))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append((float(halved(values)), torch.linalg.vector_norm(rows, dim=1).tolist()))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]
    assert found[0][0] == pytest.approx(float(values.sum()))
    assert total([0.1] * 6) == ((0.1 + 0.1) + (0.1 + 0.1)) + (0.1 + 0.1)


@given(st.integers(1, 70), st.integers(0, 70))
def test_an_update_does_not_depend_on_the_cut(length: int, cut: int) -> None:
    """Every number is updated as part of a whole vector, and written back, however a tensor is cut."""

    def update(first: int, last: int, values: list[torch.Tensor]) -> None:
        with whole_vectors([(*(v[first:last] for v in values), torch.zeros(()))]) as rows:  # type: ignore[list-item]
            for row in rows:
                assert row[0].numel() % 16 == 0
                row[0].add_(row[1] * row[2] + row[3])
                row[2].mul_(0.9)

    draw = torch.Generator().manual_seed(length)
    whole = [torch.randn(length, generator=draw) for _ in range(4)]
    parts = [value.clone() for value in whole]
    update(0, length, whole)
    for first, last in ((0, min(cut, length)), (min(cut, length), length)):
        update(first, last, parts)
    assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))


def test_what_differs_between_machines_is_said() -> None:
    """A line for each thing with the ranks that have it; from the ranks of before, too."""
    one, other = {"rank": 0, **numerics.own()}, {"rank": 1, **numerics.own()}
    assert numerics.differences([one, other]) == []
    (line,) = numerics.differences([one, other | {"instructions": "AVX9"}, other | {"rank": 2}])
    assert line.startswith(
        f"train.virtual_ranks: the CPU instruction set differs: {one['instructions']} on ranks 0, 2; AVX9"
    )
    assert numerics.changed({"raydist": "1", **numerics.own()}) == []
    (line,) = numerics.changed({**numerics.own(), "threads": "64"})
    assert "cluster.cpus_per_worker) was 64 when the checkpoint was written" in line


def test_statistics_of_a_rank_are_refused() -> None:
    """BatchNorm's; not those of a batch alone."""
    refuse_running_statistics(nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.LayerNorm(3)))
    with pytest.raises(UserError, match="0: BatchNorm1d has statistics of the samples of this rank"):
        refuse_running_statistics(nn.Sequential(nn.BatchNorm1d(3)))
