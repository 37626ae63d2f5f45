"""The tree of `train.virtual_ranks`, and who computes which part of it."""

from __future__ import annotations

import math
from pathlib import Path

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
from raydist.worker.comm.tree import Fold, Tree, cover, halved, total
from raydist.worker.optim.aligned import whole_vectors
from raydist.worker.parts import Parts


def nested(first: int, last: int, each: int) -> str:
    """The sum of terms as it is written, straight from the definition."""
    if last - first == 1:
        return str(first)
    left = each if last - first > each else 1
    while 2 * left < last - first:
        left *= 2
    return plus(nested(first, first + left, each), nested(first + left, last, each))


def plus(one: str, other: str) -> str:
    """Their sum, the one with the lower terms first."""
    terms = sorted((one, other), key=lambda text: int(text.lstrip("(").split("+")[0]))
    return f"({terms[0]}+{terms[1]})"


@given(st.integers(1, 20), st.integers(1, 4), st.data())
def test_however_terms_are_spread_the_sum_is_the_same(each: int, groups: int, data: st.DataObject) -> None:
    """Terms on any ranks, which come in any order, folded there and then together, give the one nested sum; a rank that has a
    stretch of the terms of a group never keeps more than log2 + 1 of them."""
    tree = Tree(each, groups)
    owners = data.draw(st.lists(st.integers(0, 3), min_size=tree.count, max_size=tree.count))
    order = data.draw(st.permutations(range(tree.count)))
    together: Fold[str] = Fold(tree, plus)
    for rank in data.draw(st.permutations(range(4))):
        own: Fold[str] = Fold(tree, plus)
        for term in order:
            if owners[term] == rank:
                own.push((term, term + 1), str(term))
        assert [node for node, _ in own.nodes] == cover(tree, (t for t in order if owners[t] == rank))
        for node, value in own.nodes:
            together.push(node, value)
    assert [value for _, value in together.nodes] == [nested(0, tree.count, each)]
    row: Fold[str] = Fold(tree, plus)
    for term in range(each):
        row.push((term, term + 1), str(term))
        assert len(row.nodes) <= each.bit_length()


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """(parts, replicas, replicas that share experts, places of a rank in a set of these, ranks that reduce together)."""
    unit, sets, places = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    size = sets * places
    together = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    return unit * draw(st.integers(sets, 3 * sets)), unit * sets, unit, places, together


@given(layouts())
def test_each_part_once_and_all_in_order(layout: tuple[int, int, int, int, int]) -> None:
    """Every term is one rank's; in the last turn every rank has one; all ranks make as many passes; ranks with parts in a row send
    few nodes; a batch's samples are those of the parts, and those of a unit are computed at the same time."""
    count, replicas, unit, places, together = layout
    size = replicas // unit * places
    ranks = [Parts(count, rank, size, together, replicas=replicas, unit=unit) for rank in range(size)]
    assert sorted(term for each in ranks for term in each.own if term is not None) == list(
        range(count // unit * places)
    )
    assert len({len(each.own) for each in ranks}) == 1
    assert all(each.own[-1] is not None for each in ranks)
    if together == 1:
        assert max(map(len, ranks[0].nodes_of_copies())) <= 2 * (count // unit).bit_length()
    ids = np.arange(3 * count)
    divide = equal_parts(2)
    own = [ranks[0].of_replica(replica) for replica in range(replicas)]
    assert sorted(part for each in own for part in each if part is not None) == list(range(count))
    for first in range(0, replicas, unit):
        for turn in zip(*own[first : first + unit], strict=True):
            of_turn = [part for part in turn if part is not None]
            assert not of_turn or of_turn == [*range(of_turn[0], of_turn[0] + unit)]
            assert not of_turn or of_turn[0] % unit == 0
    for replica in range(replicas):
        batches = ranks[0].divide(divide)(ids, replica, replicas)
        expected = [b.tolist() for p in own[replica] if p is not None for b in divide(ids, p, count)]
        assert [b.tolist() for b in batches if len(b)] == expected


@given(st.integers(1, 12), st.data())
def test_a_copy_takes_parts_in_turn(count: int, data: st.DataObject) -> None:
    """In each turn the parts of the ranks that reduce together follow those of the turn before."""
    size = data.draw(st.integers(1, count))
    together = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    ranks = [Parts(count, rank, size, together) for rank in range(size)]
    found = []
    for copy in range(size // together):
        turns = zip(*(each.own for each in ranks[copy * together : (copy + 1) * together]), strict=True)
        found += [part for turn in turns for part in turn if part is not None]
    assert found == list(range(count))


def test_parts_that_ranks_cannot_share() -> None:
    """One clear error for more ranks than parts, and for parts that are no whole units."""
    with pytest.raises(UserError, match=r"train.virtual_ranks: 2: 3 workers .* are more than there are parts"):
        Parts(2, 0, 3)
    with pytest.raises(UserError, match=r"train.virtual_ranks: 6: parts are computed by 4 replicas together"):
        Parts(6, 0, 1, replicas=4, unit=4)


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
    assert total(Tree(6), [0.1] * 6) == ((0.1 + 0.1) + (0.1 + 0.1)) + (0.1 + 0.1)


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


def test_whole_gradients_that_wait() -> None:
    """Of a rank with k parts, before its last one: log2(k) where numbers are powers of two, else at most two more. This is what ddp
    and zero1 hold beside a gradient (docs/explanation/same-bits.md)."""
    for count in range(1, 25):
        for world in range(1, count + 1):
            for rank in range(world):
                parts, most = Parts(count, rank, world), 0
                own = [term for term in parts.own if term is not None]
                for done in range(1, len(own)):
                    most = max(most, len(cover(parts.tree, own[:done])))
                assert most <= math.log2(len(own)) + 2
                if count.bit_count() == world.bit_count() == 1:
                    assert most == math.log2(len(own))


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


def test_processors_differ_by_vendor_and_vector_instructions(tmp_path: Path) -> None:
    """By which MKL and oneDNN choose kernels; not by other flags, nor by their order. Arm's have other names."""
    lines = {
        "intel": "vendor_id : GenuineIntel\nflags : fpu avx2 avx512f amx_tile avx512_bf16\n\nprocessor : 1",
        "again": "vendor_id\t: GenuineIntel\nflags\t: ht avx512_bf16 amx_tile avx512f avx2\n\nprocessor : 1",
        "older": "vendor_id : GenuineIntel\nflags : fpu avx2 avx512f\n",
        "amd": "vendor_id : AuthenticAMD\nflags : fpu avx2 avx512f\n",
        "arm": "CPU implementer : 0x41\nFeatures : fp asimd sve2 bf16\n",
        "empty": "",
    }
    found = {}
    for name, text in lines.items():
        (tmp_path / name).write_text(text)
        found[name] = numerics.processor(tmp_path / name)
    assert found.pop("again") == found["intel"]
    assert len({*found.values()}) == len(found)
    assert found["intel"].startswith("GenuineIntel ")
    assert (found["empty"], numerics.processor(tmp_path / "none")) == ("", "")


def test_statistics_of_a_rank_are_refused() -> None:
    """BatchNorm's; not those of a batch alone."""
    refuse_running_statistics(nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.LayerNorm(3)))
    with pytest.raises(UserError, match="0: BatchNorm1d has statistics of the samples of this rank"):
        refuse_running_statistics(nn.Sequential(nn.BatchNorm1d(3)))
