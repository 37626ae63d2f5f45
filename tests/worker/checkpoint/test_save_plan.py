"""How the state is split over the ranks: complete, without overlap, balanced, and the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.worker.checkpoint import save_plan
from raydist.worker.parameter_table import TensorRow, TensorTable, dtype_name


def table(tensors: Mapping[str, torch.Tensor], rank: int = 0, world_size: int = 1) -> TensorTable:
    """Plain tensors that all ranks hold whole."""
    everyone, aliases = tuple(range(world_size)), save_plan.aliases(tensors)
    rows = {
        n: TensorRow(n, tuple(t.shape), dtype_name(t.dtype), (), everyone, (everyone,), aliases.get(n))
        for n, t in tensors.items()
    }
    return TensorTable(rows, rank, world_size)


shapes = st.lists(st.lists(st.integers(0, 7), max_size=3), max_size=12)


@settings(max_examples=200, deadline=None)
@given(shapes=shapes, scale=st.sampled_from([1, 100_000]), world_size=st.integers(1, 5))
def test_every_row_is_saved_once(shapes: list[list[int]], scale: int, world_size: int) -> None:
    """Over the ranks, the ranges of each tensor are contiguous without gaps; a small tensor is not split."""
    tensors = [(f"t{i}", tuple(s), math.prod(s) * 4 * scale) for i, s in enumerate(shapes)]
    found: dict[str, list[tuple[int, int]]] = {name: [] for name, _, _ in tensors}
    for rank in range(world_size):
        for name, first, last in save_plan.stretch(tensors, rank, world_size):
            found[name].append((first, last))
    for name, shape, nbytes in tensors:
        rows = shape[0] if shape else 1
        ends = [0, *(last for _, last in found[name])]
        assert [first for first, _ in found[name]] == ends[:-1], name
        assert ends[-1] == rows
        assert found[name], f"{name} is saved even if it is empty"
        assert nbytes >= save_plan.SPLIT_BYTES or len(found[name]) == 1


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(st.integers(1000, 5000), min_size=1, max_size=8), world_size=st.integers(1, 6))
def test_ranks_save_equal_shares(rows: list[int], world_size: int) -> None:
    """Each rank saves its share of the bytes of large tensors, to within a few rows."""
    tensors = [(f"t{i}", (n, 1000), n * 4000) for i, n in enumerate(rows)]
    size = {name: nbytes // shape[0] for name, shape, nbytes in tensors}
    shares = [
        sum((b - a) * size[n] for n, a, b in save_plan.stretch(tensors, r, world_size)) for r in range(world_size)
    ]
    assert max(shares) - min(shares) <= 2 * 4000


def test_parts_do_not_overlap() -> None:
    """Each part starts after the one before, at a multiple of ALIGN."""
    tensors = {"a": torch.zeros(3, dtype=torch.int8), "b": torch.zeros(5, dtype=torch.float64), "c": torch.zeros(())}
    parts = save_plan.plan(tensors, {"r": torch.zeros(2)}, table(tensors))
    assert [p.name for p in parts] == ["a", "b", "c", "rank/00000/r"]
    assert [p.start for p in parts] == [0, 64, 128, 192]


def test_tied_weights_are_saved_once() -> None:
    """A tensor with two names is stored once; a view with another shape is not tied."""
    weight = torch.randn(4, 6)
    tensors = {"embedding": weight, "head": weight, "view": weight.view(6, 4)}
    assert save_plan.aliases(tensors) == {"head": "embedding"}
    assert [p.name for p in save_plan.plan(tensors, {}, table(tensors))] == ["embedding", "view"]


def test_what_is_whole_beside_shards_is_rank_0_s() -> None:
    """If it is smaller than `gather_bytes`: then a rank's state is in two shards. Without shards, or above, it is split over the
    ranks."""
    whole = {f"t{i}": torch.zeros(4) for i in range(6)}
    assert [p.name for p in save_plan.plan(whole, {}, table(whole, 1, 2), gather_bytes=1 << 20)] == ["t3", "t4", "t5"]


def test_each_group_of_ranks_saves_what_it_holds() -> None:
    """Each of two stages saves its own tensors, split over its ranks; every tensor once over all ranks."""
    names = {(0, 1): ["a", "b"], (2, 3): ["c", "d"]}
    rows = {
        n: TensorRow(n, (4,), "float32", (), ranks, (ranks,)) for ranks, of_stage in names.items() for n in of_stage
    }
    saved = []
    for ranks, of_stage in names.items():
        for rank in ranks:
            parts = save_plan.plan({n: torch.zeros(4) for n in of_stage}, {}, TensorTable(rows, rank, 4))
            saved.append([p.name for p in parts])
    assert saved == [["a"], ["b"], ["c"], ["d"]]
